"""Engines that leave and join during a simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.errors import UserError
from interlace.rollouts.pool import EnginePool
from interlace.runtime.sim.loop import virtual_loop


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChange:
    """Departure or return of one engine."""

    at_s: float
    """Virtual seconds since the run began."""
    engine: int
    """Number of the rollout instance."""
    joins: bool


def parse_changes(text: str) -> tuple[EngineChange, ...]:
    """Parses `600:-3,1200:+3`: engine 3 leaves after 600 seconds and returns after 1200. Raises UserError."""
    found = []
    for part in text.split(","):
        at_s, _, change = part.strip().partition(":")
        try:
            found.append(
                EngineChange(at_s=float(at_s), engine=int(change[1:]), joins={"+": True, "-": False}[change[0]])
            )
        except (ValueError, KeyError, IndexError):
            raise UserError(
                f"engines={text!r}: {part.strip()!r} is no change. Write seconds and the engine that leaves or comes "
                "back, as in 600:-3,1200:+3."
            ) from None
    return tuple(sorted(found, key=lambda each: each.at_s))


async def change_engines(pool: EnginePool, changes: Sequence[EngineChange]) -> None:
    """Applies each change at its time. Raises UserError for an unknown engine and if no engine would be left."""
    loop, drivers = virtual_loop(), pool.drivers
    for change in changes:
        if change.engine not in range(len(drivers)):
            raise UserError(f"there is no engine {change.engine}: the run has {len(drivers)}, counted from 0.")
        await loop.alarm(max(0.0, change.at_s - loop.now_s))
        others = [driver for driver in drivers if driver is not drivers[change.engine]]
        if change.joins:
            drivers[change.engine].join()
        elif all(driver.is_away for driver in others):
            raise UserError(f"engine {change.engine} is the last one, and is to leave: the run could not go on.")
        else:
            drivers[change.engine].leave(others)
