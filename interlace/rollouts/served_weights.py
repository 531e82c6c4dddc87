"""Weights of all rollout engines: newest version, engines with a pending swap, and waits for a version."""

from collections.abc import Sequence

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.pending_swaps import PendingSwaps
from interlace.runtime.waits import WaitRegistry
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import WeightRef


class ServedWeights:
    """Brings published weights to the engines of a pool.

    Consumes: references to published weights (`publish`).
    Produces: engines that serve the newest version.
    Waits for: the swap of each engine (`wait_for`).
    Released by: swaps, and engines that leave.
    """

    def __init__(self, waits: WaitRegistry, drivers: Sequence[EngineDriver], schedule: Schedule) -> None:
        """drivers: engines of the pool, which may change later."""
        self._drivers, self._drains = drivers, schedule.on_update == "drain"
        self.pending = PendingSwaps[EngineDriver](waits)
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

    def bring_newest(self, driver: EngineDriver) -> None:
        """Gives the weights of the last publication to one engine that joins."""
        if self.newest is not None:
            self._send_weights(driver, self.newest)

    def _send_weights(self, driver: EngineDriver, ref: WeightRef) -> None:
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

    def count_versions(self, driver: EngineDriver) -> None:
        """Updates `most_versions`. driver: engine that has just finished a sequence."""
        if self.pending.num:
            serving = {each.version for each in self._drivers if each.jobs.running} | {driver.version}
            self.most_versions = max(self.most_versions, len(serving))
