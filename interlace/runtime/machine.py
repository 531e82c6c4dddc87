"""Machines of a cluster, and the devices on them that a run uses."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.errors import UserError, nearest
from interlace.schedule.placement import Device

SHARED_BY = 4
"""Number of CPU devices that may share a core, so that small machines can run schedules for several devices."""
_POOL = re.compile(r"(?P<pool>[a-z]+)(:(?P<count>\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One computer."""

    num_cores: int
    memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU."""
    name: str = ""
    """Name of the machine in its cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSlot:
    """A device and its location."""

    device: Device
    machine: str
    local_name: str
    """Name of the device in torch on its machine: `cuda:1` may be the cluster's ninth GPU."""


def find_slots(spec: str, machines: Sequence[Machine]) -> tuple[DeviceSlot, ...]:
    """Finds the devices of `auto`, or of counts by kind (`cpu:2`, `cuda:1,cpu:4`). A kind without a count means all.

    `auto` takes every GPU, or one device per CPU core if there is no GPU. Up to SHARED_BY CPU devices share a core.
    Raises UserError for a spec that cannot be read and for devices that do not exist.
    """
    if spec == "auto":
        spec = "cuda" if any(machine.gpu_bytes for machine in machines) else "cpu"
    slots: list[DeviceSlot] = []
    for pool, count in read_counts(spec).items():
        found = _find_cores(count, machines) if pool == "cpu" else _find_gpus(count, machines, spec)
        for pool_index, (machine, local_index, memory_bytes) in enumerate(found):
            device = Device(index=len(slots), pool=pool, pool_index=pool_index, memory_bytes=memory_bytes)
            slots.append(DeviceSlot(device=device, machine=machine, local_name=f"{pool}:{local_index}"))
    return tuple(slots)


def read_counts(spec: str) -> dict[str, int | None]:
    """Reads counts by kind, such as `cuda:1,cpu:4`. A kind without a count has None. Raises UserError."""
    counts: dict[str, int | None] = {}
    for part in spec.split(","):
        match = _POOL.fullmatch(part.strip())
        if match is None or match["pool"] in counts:
            raise UserError(f"cluster.devices = {spec!r}: write auto, or each kind once with a count, such as cpu:2.")
        pool = match["pool"]
        if pool not in ("cpu", "cuda"):
            hint = " Did you mean 'cuda'?" if pool in ("gpu", "gpus", "nvidia") else ""
            raise UserError(
                f"cluster.devices = {spec!r}: unknown kind {pool!r}.{hint or nearest(pool, ['cpu', 'cuda'])}"
            )
        counts[pool] = int(match["count"]) if match["count"] else None
        if counts[pool] == 0:
            raise UserError(
                f"cluster.devices = {spec!r} requests no device of the kind {pool!r}, and a run needs one device or "
                f"more. Write {pool}:1 or a larger count, {pool} for all devices of the kind, or auto."
            )
    return counts


def _find_cores(count: int | None, machines: Sequence[Machine]) -> list[tuple[str, int, int]]:
    """Returns (machine, index, bytes) of each CPU device.

    If a count is given, they are spread evenly over the machines.
    """
    shares = [machine.num_cores for machine in machines]
    if count is not None:
        most = SHARED_BY * sum(shares)
        if count > most:
            raise UserError(
                f"cluster.devices asks for cpu:{count}, and there are {sum(shares)} CPU cores, which {most} devices "
                f"may share at most. Write cpu:{sum(shares)}, or a number up to {most}."
            )
        share, rest = divmod(count, len(machines))
        shares = [share + (place < rest) for place in range(len(machines))]
    return [
        (machine.name, index, machine.memory_bytes // share)
        for machine, share in zip(machines, shares, strict=True)
        for index in range(share)
    ]


def _find_gpus(count: int | None, machines: Sequence[Machine], spec: str) -> list[tuple[str, int, int]]:
    found = [
        (machine.name, index, memory_bytes)
        for machine in machines
        for index, memory_bytes in enumerate(machine.gpu_bytes)
    ]
    if len(found) < (count or 1):
        where = "this machine has" if len(machines) == 1 else f"these {len(machines)} machines have"
        raise UserError(
            f"cluster.devices = {spec!r}: {where} {len(found)} GPUs that torch can use. Request at most these, "
            f"`auto`, or CPU cores: cpu:{sum(machine.num_cores for machine in machines)}."
        )
    return found[:count]
