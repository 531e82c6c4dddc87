"""Idle times of an engine during which tools of its samples run, for the goodput ledger."""

from collections import Counter
from collections.abc import Iterable, Sequence

from interlace.core.types import Request, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.runtime.timeline import Timeline, ToolWait


class ToolWaits:
    """Tracks for each sample whether a turn is in progress or whether its episode's code and tools run.

    An engine waits if it has no requests while the code or tools of a sample run whose last turn it generated. Before
    the first turn of a sample, all engines wait for it.
    """

    def __init__(self, timeline: Timeline, drivers: Sequence[EngineDriver]) -> None:
        """drivers: engines of the pool, which may change later; see `look`."""
        self._timeline, self._drivers = timeline, drivers
        self._num_turns: dict[SampleKey, int] = {}
        """Number of turns in progress, by sample."""
        self._homes: dict[SampleKey, EngineDriver | None] = {}
        self._owners: dict[str, SampleKey] = {}
        """Sample of each turn in progress."""
        self._away: Counter[EngineDriver | None] = Counter()
        """Number of samples without a turn in progress, by engine."""
        self._open: dict[EngineDriver, ToolWait] = {}
        """Engines that wait now, each with its wait in the timeline."""
        self._changed: dict[EngineDriver | None, None] = {}
        """Engines to read at the next look, in the order of their changes."""
        self._was_everywhere = False
        """True if all engines waited for a sample without a turn at the last look."""

    def __bool__(self) -> bool:
        """Returns whether any sample runs an episode."""
        return bool(self._num_turns)

    def begin(self, owners: Sequence[SampleKey]) -> None:
        for owner in owners:
            self._num_turns[owner], self._homes[owner] = 0, None
        self._away[None] += len(owners)
        self.look(())

    def begin_turn(self, request: Request) -> None:
        owner = request.owner
        if owner not in self._num_turns:
            return
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] -= 1
            self._changed[self._homes[owner]] = None
        self._num_turns[owner] += 1
        self._owners[request.id] = owner

    def end_turn(self, request_id: str, driver: EngineDriver | None) -> None:
        """Records the end of a turn. driver: driver of the engine that finished it, None if it was withdrawn."""
        owner = self._owners.pop(request_id, None)
        if owner is None:  # the request of an evaluation, for example
            self.look((driver,))
            return
        before = self._homes[owner]
        self._homes[owner] = driver or before
        self._num_turns[owner] -= 1
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] += 1
        self.look((before, driver))

    def end(self, owner: SampleKey) -> None:
        """Records the end of a sample, after all its turns."""
        if self._num_turns.pop(owner, None) is not None:
            home = self._homes.pop(owner)
            self._away[home] -= 1
            self.look((home,))

    def look(self, changed: Iterable[EngineDriver | None]) -> None:
        """Starts and ends the waits of engines in the timeline.

        changed: engines whose requests or samples have changed since the last look. All engines are read only if they
        begin or end to wait for a sample before its first turn.
        """
        if not self._num_turns and not self._open:
            return
        is_everywhere = self._away[None] > 0
        self._changed |= dict.fromkeys(changed)
        drivers = self._drivers if is_everywhere != self._was_everywhere else self._changed
        for driver in drivers:
            if driver is not None:
                self._update(driver, is_everywhere=is_everywhere)
        self._changed, self._was_everywhere = {}, is_everywhere

    def leave(self, driver: EngineDriver) -> None:
        if driver in self._open:
            self._timeline.end_wait(self._open.pop(driver))

    def _update(self, driver: EngineDriver, *, is_everywhere: bool) -> None:
        waits = not driver.load.num_requests and (is_everywhere or self._away[driver] > 0)
        if waits == (driver in self._open):
            return
        if waits:
            self._open[driver] = self._timeline.begin_wait(driver.group.device_indices)
        else:
            self._timeline.end_wait(self._open.pop(driver))
