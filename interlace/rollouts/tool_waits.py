"""Times in which an engine has nothing to do because the tools of its samples run, for the goodput ledger."""

from collections import Counter
from collections.abc import Sequence

from interlace.core.types import Request, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.runtime.timeline import Timeline


class ToolWaits:
    """Samples of several turns: those that have a turn under way, and those whose own code and tools run.

    A sample waits for the engine of its last turn; before its first turn, for any.
    """

    def __init__(self, timeline: Timeline, drivers: Sequence[EngineDriver]) -> None:
        self._timeline, self._drivers = timeline, drivers
        self._num_turns: dict[SampleKey, int] = {}
        """Turns under way, of each sample."""
        self._homes: dict[SampleKey, EngineDriver | None] = {}
        self._owners: dict[str, SampleKey] = {}
        """Owner of each turn under way."""
        self._away: Counter[EngineDriver | None] = Counter()
        """Samples without a turn under way, by their engine."""
        self._open: dict[EngineDriver, int] = {}
        """Engines that wait now, each with its token of the timeline."""

    def begin(self, owners: Sequence[SampleKey]) -> None:
        """Notes samples whose code begins to run."""
        for owner in owners:
            self._num_turns[owner], self._homes[owner] = 0, None
        self._away[None] += len(owners)
        self.look()

    def asked(self, request: Request) -> None:
        """Notes that a turn begins."""
        owner = request.owner
        if owner not in self._num_turns:
            return
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] -= 1
        self._num_turns[owner] += 1
        self._owners[request.id] = owner

    def settled(self, request_id: str, driver: EngineDriver | None) -> None:
        """Notes that a turn ended, or was given up. driver: of the engine that ended it."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return
        self._homes[owner] = driver or self._homes[owner]
        self._num_turns[owner] -= 1
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] += 1
        self.look()

    def end(self, owner: SampleKey) -> None:
        """Notes that a sample ended, after all its turns."""
        if self._num_turns.pop(owner, None) is not None:
            self._away[self._homes.pop(owner)] -= 1
            self.look()

    def look(self) -> None:
        """Notes which engines wait now."""
        if not self._num_turns and not self._open:
            return
        everywhere = self._away[None]
        for driver in self._drivers:
            waits = not driver.load.num_requests and self._away[driver] + everywhere > 0
            if waits == (driver in self._open):
                continue
            if waits:
                self._open[driver] = self._timeline.begin_wait(driver.group.device_indices)
            else:
                self._timeline.end_wait(self._open.pop(driver))
