"""Weights of all rollout engines: newest version, engines with a pending swap, and waits for a version."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.loads import Loads
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import WeightRef

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver


class OpenEngines:
    """Engines of a pool that start new requests, in the order of creation.

    The list is kept up to date by changes of single engines: a cluster has thousands of them, and each dispatches again
    at a publication.
    """

    def __init__(self) -> None:
        self.drivers: list[EngineDriver] = []
        self.loads = Loads()
        """Load of each of them."""

    def update(self, driver: "EngineDriver", *, is_open: bool) -> None:
        """Records whether an engine starts new requests."""
        place, was_open = self._find_position(driver)
        if is_open and not was_open:
            self.drivers.insert(place, driver)
            self.loads.add(driver.number, driver.load)
        elif was_open and not is_open:
            del self.drivers[place]
            self.loads.remove(driver.number)

    def find_place(self, driver: "EngineDriver") -> int | None:
        """Returns the index of an engine in `drivers`; None if it starts no requests."""
        place, is_open = self._find_position(driver)
        return place if is_open else None

    def _find_position(self, driver: "EngineDriver") -> tuple[int, bool]:
        """Returns the index that an engine has or would have, and whether it is among the engines."""
        place = bisect_left(self.drivers, driver.number, key=attrgetter("number"))
        return place, place < len(self.drivers) and self.drivers[place] is driver


class PendingSwaps:
    """Engines with pending weights or queued requests, and the signal for tasks that wait for a version."""

    def __init__(self, waits: WaitRegistry) -> None:
        self.num = 0
        """Number of engines with pending weights."""
        self.open = OpenEngines()
        self.queues: dict[EngineDriver, None] = {}
        """Engines whose queued requests wait for their swap: few, even on a cluster with thousands of engines."""
        self._numbers = itertools.count()
        self.changed = Signal(waits)
        """Fires when an engine has swapped or left."""

    def number_engine(self) -> int:
        return next(self._numbers)

    def finish(self) -> None:
        """Records that an engine serves its pending weights."""
        self.num -= 1
        self.changed.fire()


class ServedWeights:
    """Brings published weights to the engines of a pool.

    Consumes: references to published weights (`publish`).
    Produces: engines that serve the newest version.
    Waits for: the swap of each engine (`wait_for`).
    Released by: swaps, and engines that leave.
    """

    def __init__(self, waits: WaitRegistry, drivers: "Sequence[EngineDriver]", schedule: Schedule) -> None:
        """drivers: engines of the pool, which may change later."""
        self._drivers, self._drains = drivers, schedule.on_update == "drain"
        self.pending = PendingSwaps(waits)
        self.newest: WeightRef | None = None
        """Weights of the last publication."""
        self.most_versions = 1
        """Most versions that engines served at the same time, since the start."""

    def follow(self, schedule: Schedule) -> None:
        self._drains = schedule.on_update == "drain"

    def publish(self, ref: WeightRef) -> None:
        """Gives new weights to every engine, which swaps as soon as `on_update` allows."""
        self.newest = ref
        for driver in self._drivers:
            self._send_weights(driver, ref)

    def bring_newest(self, driver: "EngineDriver") -> None:
        """Gives the weights of the last publication to one engine that joins."""
        if self.newest is not None:
            self._send_weights(driver, self.newest)

    def _send_weights(self, driver: "EngineDriver", ref: WeightRef) -> None:
        self.pending.num += not driver.weights.has_pending
        driver.update_weights(ref)

    @property
    def drains_for(self) -> int | None:
        """Version that all engines drain for, so that none starts a request. None if an engine starts requests."""
        here = [driver for driver in self._drivers if not driver.is_away]
        versions = [driver.weights.pending_version for driver in here]
        pending = [version for version in versions if version is not None]
        return min(pending) if self._drains and pending and len(pending) == len(here) else None

    async def wait_for(self, version: int, *, who: str) -> None:
        """Waits until every engine of the pool serves `version` or a newer one, under a name for the wait-for graph."""
        while any(driver.version < version and not driver.is_away for driver in self._drivers):
            await self.pending.changed.wait(who=who, what=f"all engines to serve version {version}")

    def count_versions(self, driver: "EngineDriver") -> None:
        """Updates `most_versions`. driver: engine that has just finished a sequence."""
        if self.pending.num:
            serving = {each.version for each in self._drivers if each.jobs.running} | {driver.version}
            self.most_versions = max(self.most_versions, len(serving))
