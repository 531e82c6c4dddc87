"""The planner of a run is told which devices work."""

import asyncio
from collections.abc import Collection

from interlace.core.errors import UserError
from interlace.run.device_watch import LOST_STEPS, DeviceWatch
from interlace.schedule.schedule import Schedule

RUNNING = Schedule()


class Told:
    """Planner that records the devices that it is told."""

    def __init__(self) -> None:
        self.devices: list[list[int]] = []

    def follow_devices(self, remaining: Collection[int], running: Schedule) -> None:
        assert running is RUNNING
        self.devices.append(list(remaining))


def tell(watch: DeviceWatch, lost: frozenset[int], steps: int) -> None:
    for _ in range(steps):
        asyncio.run(watch.look(lost, RUNNING))


def test_devices_are_gone_if_their_engines_stay_lost_and_the_cluster_has_fewer() -> None:
    planner = Told()
    watch = DeviceWatch(planner, 4, lambda: 3)
    tell(watch, frozenset(), 9)
    tell(watch, frozenset({1}), LOST_STEPS - 1)
    assert planner.devices == []
    tell(watch, frozenset({1}), 9)
    assert planner.devices == [[0, 2, 3]]
    tell(watch, frozenset(), 9)
    assert planner.devices == [[0, 2, 3], [0, 1, 2, 3]], "the engine is back"


def test_an_engine_that_is_lost_on_a_device_of_the_cluster_changes_no_plan() -> None:
    """A run that starts again would place a worker on that device."""
    planner = Told()
    tell(DeviceWatch(planner, 4, lambda: 4), frozenset({1}), 3 * LOST_STEPS)

    def refuse() -> int:
        raise UserError("this cluster has three devices, and the recipe requires four")

    tell(DeviceWatch(planner, 4, refuse), frozenset({1}), 3 * LOST_STEPS)
    assert planner.devices == []
