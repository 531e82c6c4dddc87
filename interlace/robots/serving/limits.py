"""Safety limits of actions: bounds, changes between two actions, and a watchdog. A = numbers of an action.

The robot's side and the server apply the same limits. They do not replace the limits of the hardware.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import FloatArray


class SafetyLimits(Config):
    """Limits of a robot's actions, in the units of its actions. One number is valid for all numbers of an action."""

    low: tuple[float, ...] = ()
    """[A] or [1] smallest values. If empty, no lower bound."""
    high: tuple[float, ...] = ()
    """[A] or [1] largest values. If empty, no upper bound."""
    max_change: tuple[float, ...] = ()
    """[A] or [1] largest change between two successive actions. If empty, any change is allowed."""
    watchdog_s: float | None = Field(default=None, gt=0)
    """Seconds without a new chunk after which the robot executes the safe action only; the server answers with an error
    if a chunk takes longer. If None, the robot waits for the duration of a chunk and one second, and the server does
    not limit the time."""
    safe_action: Literal["hold", "zero"] = "hold"
    """Action without a chunk: `hold` repeats the last action, for positions, and is none before the first one; `zero`
    is 0, for velocities and displacements."""

    def check_size(self, size: int) -> None:
        """Raises UserError if the limits are not of actions of `size` numbers."""
        for name in ("low", "high", "max_change"):
            given = getattr(self, name)
            if len(given) not in (0, 1, size):
                raise UserError(
                    f"safety limits: {name} has {len(given)} numbers, and an action of the policy has {size}. Give one "
                    f"number for all, or {size}."
                )
        low, high = (_spread(getattr(self, name), size, 0.0) for name in ("low", "high"))
        if self.low and self.high and (low > high).any():
            raise UserError(f"safety limits: low = {list(self.low)} is above high = {list(self.high)}.")
        if any(each <= 0 for each in self.max_change):
            raise UserError(
                f"safety limits: max_change = {list(self.max_change)} allows no movement. Give positive ones."
            )


class ServingSettings(Config):
    """Settings of `interlace serve --policy`; on the command line `policy.KEY=VALUE`."""

    control_hz: float = Field(default=10.0, gt=0, le=1000)
    """Actions per second of the robot, which the schema states."""
    sample: bool = False
    """True to sample chunks; False for the most probable chunk. A published policy (SmolVLA, pi0, pi0.5) begins with
    noise of a fixed seed, and with `sample` with new noise for each chunk."""
    limits: SafetyLimits | None = None
    """Limits that the server applies to actions. A bound that is not set is the bound of the simulator's actions."""
    record: str | None = None
    """New folder for the actions of humans, a LeRobotDataset. If None, the server refuses them."""


@dataclass(slots=True)
class LimitCounts:
    """Numbers of actions that a limit changed."""

    bounds: int = 0
    change: int = 0
    not_finite: int = 0
    safe_actions: int = 0
    """Ticks with the safe action."""

    @property
    def num_violations(self) -> int:
        """Number of changed actions, without safe ones; an action with two violations counts twice."""
        return self.bounds + self.change + self.not_finite


@dataclass(slots=True, eq=False)
class ActionLimiter:
    """Applies the limits to successive actions of one robot."""

    limits: SafetyLimits
    size: int
    """Numbers of an action, A."""
    previous: FloatArray | None = None
    """[A] last action; None before the first one."""
    counts: LimitCounts = field(default_factory=LimitCounts)

    def __post_init__(self) -> None:
        self.limits.check_size(self.size)

    def limit(self, action: FloatArray) -> FloatArray:
        """Returns the action within all limits, which becomes the last one. A number that is not finite is replaced.

        If the last action is outside of the bounds, actions return to them by steps of the largest change. Raises
        UserError for a number that is not finite if the safe action is `hold` and there is no last action.
        """
        found = np.array(action, np.float32)
        if not np.isfinite(found).all():
            self.counts.not_finite += 1
            held = self._hold()
            if held is None:
                raise UserError(
                    f"the action {found.tolist()} is not finite, and no earlier action is known that would be held "
                    "instead. Give the action at which the robot does not move (last_action, or start of the control "
                    "loop), or serve another policy."
                )
            found = np.where(np.isfinite(found), found, held)
        bounded = np.clip(found, *self._bounds())
        self.counts.bounds += bool((bounded != found).any())
        if self.previous is not None and self.limits.max_change:
            step = _spread(self.limits.max_change, self.size, np.inf)
            slowed = np.clip(bounded, self.previous - step, self.previous + step).astype(np.float32)
            self.counts.change += bool((slowed != bounded).any())
            bounded = slowed
        self.previous = bounded
        return bounded

    def limit_chunk(self, actions: FloatArray) -> FloatArray:
        """Returns the actions [n, A] of a chunk within all limits."""
        return np.stack([self.limit(action) for action in actions]) if len(actions) else actions

    def safe_action(self) -> FloatArray | None:
        """Returns the action without a chunk, which becomes the last one. Its change is limited too.

        Returns None for `hold` without a last action: 0 would be a position to which the robot moves at once.
        """
        wanted = np.zeros(self.size, np.float32) if self.limits.safe_action == "zero" else self._hold()
        if wanted is None:
            return None
        self.counts.safe_actions += 1
        before = (self.counts.bounds, self.counts.change)
        found = self.limit(wanted)
        self.counts.bounds, self.counts.change = before  # the policy did not ask for this action
        return found

    def _hold(self) -> FloatArray | None:
        """Returns the last action; before the first one 0 if that is safe, else None."""
        if self.previous is None and self.limits.safe_action == "zero":
            return np.zeros(self.size, np.float32)
        return self.previous

    def _bounds(self) -> tuple[FloatArray, FloatArray]:
        return _spread(self.limits.low, self.size, -np.inf), _spread(self.limits.high, self.size, np.inf)


def _spread(numbers: tuple[float, ...], size: int, default: float) -> FloatArray:
    return np.broadcast_to(np.asarray(numbers or (default,), np.float32), (size,))
