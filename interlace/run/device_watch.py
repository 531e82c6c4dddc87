"""Watch for devices that disappear while a run continues on the others."""

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from interlace.core.errors import InterlaceError
from interlace.schedule.schedule import Schedule

LOST_STEPS = 5
"""Steps without the same engines after which their devices are looked for. Most lost engines return earlier."""


class DevicePlanner(Protocol):
    """Planner of a run that continues on fewer devices."""

    def follow_devices(self, remaining: Collection[int], running: Schedule) -> None:
        """Plans for these devices from now on. running: the schedule of the run on all of its devices."""


class DeviceWatch:
    """Reports to the planner of a run that devices of lost engines are gone, and that the engines are back.

    Consumes: the devices of lost engines at each step boundary.
    Produces: the indices of the remaining devices.
    Waits for: the list of the cluster's devices, in a thread, once per loss.
    Released by: the cluster's back end.
    """

    def __init__(self, planner: DevicePlanner, num_devices: int, count_devices: Callable[[], int]) -> None:
        """num_devices: of the run. count_devices: returns how many devices a run would find now."""
        self._planner, self._num_devices, self._count_devices = planner, num_devices, count_devices
        self._lost: frozenset[int] = frozenset()
        self._num_steps = 0
        """Steps since these devices were lost."""
        self._is_fewer = False

    async def look(self, lost: frozenset[int], running: Schedule) -> None:
        """Records a step. lost: devices of lost engines. running: the schedule of the run.

        A loss counts if the cluster has lost as many devices as the engines: on other devices an engine may be started
        again, and a run that starts again would use them.
        """
        if lost != self._lost:
            self._lost, self._num_steps = lost, 0
        self._num_steps += 1
        if not lost and self._is_fewer:
            self._is_fewer = False
            self._planner.follow_devices(range(self._num_devices), running)
        if lost and self._num_steps == LOST_STEPS:
            remaining = [index for index in range(self._num_devices) if index not in lost]
            if await asyncio.to_thread(self._count) == len(remaining):
                self._is_fewer = True
                self._planner.follow_devices(remaining, running)

    def _count(self) -> int:
        try:
            return self._count_devices()
        except InterlaceError:  # a number of devices is set that the cluster no longer has, so no run could start
            return 0
