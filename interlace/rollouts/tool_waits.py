"""Idle times of an engine during which tools of its samples run, for the goodput ledger."""

from collections import Counter
from collections.abc import Sequence

from interlace.core.types import Request, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.runtime.timeline import Timeline


class ToolWaits:
    """Tracks for each sample whether a turn is in progress or whether its episode's code and tools run.

    An engine waits if it has no requests while the code or tools of a sample run whose last turn it generated. Before
    the first turn of a sample, all engines wait for it.
    """

    def __init__(self, timeline: Timeline, drivers: Sequence[EngineDriver]) -> None:
        self._timeline, self._drivers = timeline, drivers
        self._num_turns: dict[SampleKey, int] = {}
        """Number of turns in progress, by sample."""
        self._homes: dict[SampleKey, EngineDriver | None] = {}
        self._owners: dict[str, SampleKey] = {}
        """Sample of each turn in progress."""
        self._away: Counter[EngineDriver | None] = Counter()
        """Number of samples without a turn in progress, by engine."""
        self._open: dict[EngineDriver, int] = {}
        """Engines that wait now, each with the handle of its wait in the timeline."""

    def __bool__(self) -> bool:
        """Returns whether any sample runs an episode."""
        return bool(self._num_turns)

    def begin(self, owners: Sequence[SampleKey]) -> None:
        """Records samples whose episodes begin."""
        for owner in owners:
            self._num_turns[owner], self._homes[owner] = 0, None
        self._away[None] += len(owners)
        self.look()

    def begin_turn(self, request: Request) -> None:
        """Records the start of a turn."""
        owner = request.owner
        if owner not in self._num_turns:
            return
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] -= 1
        self._num_turns[owner] += 1
        self._owners[request.id] = owner

    def end_turn(self, request_id: str, driver: EngineDriver | None) -> None:
        """Records the end of a turn. driver: driver of the engine that finished it, None if it was withdrawn."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return
        self._homes[owner] = driver or self._homes[owner]
        self._num_turns[owner] -= 1
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] += 1
        self.look()

    def end(self, owner: SampleKey) -> None:
        """Records the end of a sample, after all its turns."""
        if self._num_turns.pop(owner, None) is not None:
            self._away[self._homes.pop(owner)] -= 1
            self.look()

    def look(self) -> None:
        """Starts and ends the waits of engines in the timeline."""
        if not self._num_turns and not self._open:
            return
        present = set(self._drivers)
        for driver in [each for each in self._open if each not in present]:  # it has left the run
            self._timeline.end_wait(self._open.pop(driver))
        everywhere = self._away[None]
        for driver in self._drivers:
            waits = not driver.load.num_requests and self._away[driver] + everywhere > 0
            if waits == (driver in self._open):
                continue
            if waits:
                self._open[driver] = self._timeline.begin_wait(driver.group.device_indices)
            else:
                self._timeline.end_wait(self._open.pop(driver))
