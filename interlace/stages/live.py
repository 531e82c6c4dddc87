"""Changes of a run's schedule between two steps, without a restart."""

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.lending import Lending
from interlace.rollouts.pool import EnginePool
from interlace.runtime.cluster import Cluster
from interlace.schedule.gate import Gate
from interlace.schedule.schedule import Schedule

LIVE = frozenset({"max_staleness", "pipeline_depth", "dispatch", "concurrency", "on_update", "lend_until", "placement"})
"""Fields that can change in a running process. Of the placement, only the engines that generate."""


class LiveSchedule:
    """The schedule of a running process, and the parts that can follow a change of it.

    Engines that a new placement leaves out finish their sequences elsewhere and stay loaded; they join again when a
    placement contains their devices. No sample is lost, and each keeps the deadline that it was admitted with.
    """

    def __init__(self, cluster: Cluster, schedule: Schedule, gate: Gate) -> None:
        self._cluster, self._gate, self.schedule = cluster, gate, schedule
        self._most_adapters: int | None = None
        self.pool: EnginePool | None = None
        self.lending: Lending | None = None

    def limit_adapters(self) -> None:
        """States that engines hold as many versions of an adapter as the current schedule needs, and no more."""
        self._most_adapters = self.schedule.adapters_beside

    def may_become(self, schedule: Schedule) -> bool:
        """Returns whether the run can follow a schedule without a restart."""
        now = self.schedule
        differing = {name for name in type(now).model_fields if getattr(now, name) != getattr(schedule, name)}
        if not differing <= LIVE or self.pool is None:
            return False
        if now.batches_are_fixed != schedule.batches_are_fixed:  # stages keep the order of groups, or do not
            return False
        if now.overtake is not None and now.depth != schedule.depth:  # the window has the size of the first depth
            return False
        if self._most_adapters is not None and schedule.adapters_beside > self._most_adapters:
            return False
        others = [name for name in type(now.placement).model_fields if name != "rollout"]
        if any(now.placement.of(name) != schedule.placement.of(name) for name in others):
            return False
        wanted = self._engines_of(schedule)
        return bool(wanted) and wanted <= {_devices_of(driver) for driver in self.pool.drivers}

    def become(self, schedule: Schedule) -> None:
        """Follows a schedule that may_become() accepts. Call it between two steps."""
        if not self.may_become(schedule) or self.pool is None:
            raise ValueError("this schedule needs a restart of the run")
        self.schedule = schedule
        self._gate.follow(schedule)
        self.pool.follow(schedule)
        if self.lending:
            self.lending.until = schedule.lend_until
        wanted = self._engines_of(schedule)
        self.pool.membership.follow_placement([each for each in self.pool.drivers if _devices_of(each) in wanted])

    def _engines_of(self, schedule: Schedule) -> set[tuple[int, ...]]:
        instances = schedule.instances("rollout", self._cluster.devices)
        return {tuple(device.index for device in instance) for instance in instances}


def _devices_of(driver: EngineDriver) -> tuple[int, ...]:
    return tuple(driver.group.device_indices)
