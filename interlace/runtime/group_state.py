"""The state of a group on its devices: the tenant of the device lock."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from interlace.core.errors import WorkerDiedError
from interlace.core.state_parts import STATE
from interlace.runtime.rank import GroupCall
from interlace.runtime.rank_set import RankSet
from interlace.runtime.worker import Operation, operation_of
from interlace.runtime.worker_spec import WorkerSpec

SWITCH = Operation(bin="switch", phase="switch")
"""Declaration of the operations that move a worker's state, independent of the worker's class."""
_MEASUREMENT = Operation(collect="all", on_device=False)


class Driver(Protocol):
    """A holder of a group's devices over many calls, such as a rollout engine's loop. It yields them on request."""

    @property
    def unload_arguments(self) -> tuple[object, ...]:
        """Arguments for the worker's offload()."""

    def ask_to_yield(self) -> None:
        """Requests the devices, because another group is ready."""

    def record_unloaded(self, parts: Sequence[str]) -> None:
        """Called when parts of the group's state have left the devices."""


class GroupState:
    """The state of a group's workers, loaded onto the devices and unloaded in parts, as the device lock requires."""

    def __init__(self, spec: WorkerSpec, ranks: RankSet) -> None:
        self.name, self.stage, self.preemptible = spec.name, spec.stage, spec.preemptible
        self.device_indices = tuple(device.index for device in spec.devices)
        """Indices of the group's devices within the cluster."""
        self.working_bytes = spec.working_bytes
        """Bytes that a running operation needs on each device in addition to the state."""
        self.part_bytes: Mapping[str, int] = {STATE: 0}
        """Bytes of each part of the state on each device, as last measured, in the order of unloading."""
        self._class, self._ranks = spec.worker_class, ranks
        self._driver: Driver | None = None

    def set_driver(self, driver: Driver) -> None:
        """Sets the driver, which is requested to yield the devices.

        Without a driver, the group releases them after each hold.
        """
        self._driver = driver

    @property
    def operations(self) -> Sequence[Operation]:
        """Returns the operations that need devices."""
        declared = (operation_of(self._class, name) for name in dir(self._class) if not name.startswith("_"))
        return [how for how in declared if how is not None and how.on_device and how.phase != "switch"]

    @property
    def has_one_part(self) -> bool:
        """True if the state has one part. It then stays loaded throughout a hold."""
        return len(self.part_bytes) == 1

    async def load(self, parts: Sequence[str] | None = None) -> None:
        """Loads parts of the state onto the devices. If `parts` is None, all. Called by the device lock."""
        await self._run_switch("onload", (), parts)
        await self.measure_memory(parts)

    async def unload(self, parts: Sequence[str] | None = None) -> None:
        """Unloads parts of the state from the devices. If `parts` is None, all. Called by the device lock."""
        try:
            await self._run_switch("offload", self._driver.unload_arguments if self._driver else (), parts)
        except WorkerDiedError:
            if not self._ranks.revival:
                raise  # otherwise the state ended with the process, and a later call replaces it
        if self._driver:
            self._driver.record_unloaded([*self.part_bytes] if parts is None else parts)

    async def _run_switch(self, method: str, args: tuple[Any, ...], parts: Sequence[str] | None) -> None:
        told = {} if parts is None or STATE in self.part_bytes else {"parts": tuple(parts)}
        call = GroupCall(method, SWITCH, args, told, "switch")
        # The devices are free once the peers of a dead rank have offloaded, too.
        await (self._ranks.run_to_end(call) if method == "offload" else self._ranks.run(call))

    async def measure_memory(self, parts: Sequence[str] | None = None) -> None:
        """Measures the memory of parts of the state on a device; they must be loaded. If `parts` is None, all."""
        found = await self._ranks.run(GroupCall("memory_parts", _MEASUREMENT, (), {}, "memory ledger"))
        largest = {part: max(each[part] for each in found) for part in found[0]}
        kept = {} if parts is None else {part: size for part, size in self.part_bytes.items() if part not in parts}
        self.part_bytes = largest | kept

    def count_loaded_bytes(self) -> int:
        """Returns the bytes of the whole state on each device, as last measured."""
        return sum(self.part_bytes.values())

    def ask_to_yield(self) -> None:
        """Requests that the driver yield. The device lock calls this when another group is ready."""
        if self._driver:
            self._driver.ask_to_yield()
