"""The tail policy `migrate`: moves the last sequences of a step, or of draining engines, to fewer engines."""

from collections.abc import Sequence

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.role_groups import RolloutGroup
from interlace.runtime.cluster import Cluster
from interlace.schedule.placement import ROLES
from interlace.schedule.schedule import Migrate


class Gathering:
    """Moves the last sequences to the fewest engines that can hold them."""

    def __init__(
        self,
        settings: Migrate,
        cluster: Cluster,
        engines: Sequence[RolloutGroup],
        drivers: list[EngineDriver],
        *,
        samples_per_step: int,
        drains: bool,
    ) -> None:
        """engines: engines at the start. drivers: engines of the pool, which may change later.

        samples_per_step: samples of a step, of which `remaining_share` is a share.

        drains: whether engines finish their running sequences before they swap weights.
        """
        self._settings, self._drivers, self.drains = settings, drivers, drains
        self._lock = cluster.lock
        self._most = settings.remaining_share * samples_per_step
        self._samples_per_engine = samples_per_step / len(engines)
        self._shared_devices = _find_shared_devices(cluster, engines)

    def look(self, kept: list[EngineDriver], num_left: int, *, drains: bool) -> list[EngineDriver]:
        """Moves sequences if few enough are left. Returns the engines that get requests of samples from now on.

        kept: engines that got requests so far. num_left: unfinished samples. drains: whether an engine has pending
        weights.
        """
        kept = self._gather_survivors(kept, num_left)
        if self.drains and drains:
            self._gather_draining()
        return kept

    def _gather_survivors(self, kept: list[EngineDriver], num_left: int) -> list[EngineDriver]:
        """Moves the unfinished sequences of a step to the fewest engines that can hold them, the ones with most work.

        Sequences run slower together. If other roles share the engines' devices, nothing moves before one of them waits
        for these. If sequences must finish under their first version, nothing moves while engines serve several.
        """
        if kept is not self._drivers or not self._are_few(num_left):
            return kept
        if self._shared_devices and not self._lock.is_wanted(self._shared_devices):
            return kept
        if any(driver.jobs.num_queued for driver in self._drivers):
            return kept
        if self.drains and len({driver.version for driver in self._drivers if driver.jobs.running}) > 1:
            return kept
        return self._gather_sequences(self._drivers, num_left)

    def _gather_draining(self) -> None:
        """Moves the last sequences of draining engines to the fewest of these engines.

        Sequences move among engines of one version only, so each continues under its weights. The emptied engines swap
        and start their queued requests.
        """
        draining = [driver for driver in self._drivers if driver.jobs.running and not driver.weights.starts_new]
        if any(driver.evacuation.is_due for driver in draining):
            return
        for version in dict.fromkeys(driver.version for driver in draining):
            alike = [driver for driver in draining if driver.version == version]
            self._gather_sequences(alike, sum(len(driver.jobs.running) for driver in alike))

    def _are_few(self, num_left: int) -> bool:
        return 0 < num_left <= self._most

    def _gather_sequences(self, drivers: list[EngineDriver], num_left: int) -> list[EngineDriver]:
        """Moves `num_left` sequences, if they are few, to the fewest of the engines. Returns the engines in use."""
        if not self._are_few(num_left):
            return drivers
        by_work = sorted(drivers, key=lambda driver: -len(driver.jobs.running))
        held = sum(driver.calls.kv_use for driver in by_work if driver.jobs.running)
        num_kept = self._settings.num_engines(num_left, held, samples_per_engine=self._samples_per_engine)
        if num_kept >= len(by_work):
            return drivers
        for driver in by_work[num_kept:]:
            if driver.jobs.running:
                driver.evacuation.begin(by_work[:num_kept])
        return by_work[:num_kept]


def _find_shared_devices(cluster: Cluster, engines: Sequence[RolloutGroup]) -> frozenset[int]:
    """Returns all devices of the engines if another role may run on one of them, else none.

    The devices of simulators count only if the run has simulators, because runs without them can use the same schedule.
    """
    started = {group.name.partition("/")[0] for group in cluster.groups}
    roles = [role.name for role in ROLES if role.name != "rollout" and (not role.counts_envs or role.name in started)]
    others = {device.index for role in roles for devices in cluster.place(role) for device in devices}
    mine = frozenset(index for group in engines for index in group.device_indices)
    return frozenset() if mine.isdisjoint(others) else mine
