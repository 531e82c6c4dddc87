"""Devices of this machine."""

import os
import re

from interlace.core.errors import UserError, nearest
from interlace.recipes.config import ClusterConfig
from interlace.runtime.local.cluster import LocalCluster, host_memory_bytes
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

_POOL = re.compile(r"(?P<pool>[a-z]+)(:(?P<count>\d+))?")


def open_cluster(config: ClusterConfig, schedule: Schedule) -> LocalCluster:
    """The cluster a run uses; call on the running event loop."""
    return LocalCluster(find_devices(config.devices), schedule, hang_after_s=config.hang_after_s)


def find_devices(spec: str) -> tuple[Device, ...]:
    """The devices of `auto`, or of counts by kind such as `cpu:2` or `cuda:1,cpu:4`; a kind without a count means all.

    auto takes every GPU, or where there is none one device for each CPU core. More CPU devices than cores are allowed:
    they share them. Raises UserError for a spec that cannot be read or devices that are not there.
    """
    if spec == "auto":
        spec = "cuda" if _gpu_memory() else "cpu"
    devices: list[Device] = []
    for part in spec.split(","):
        for memory_bytes in _memory_of(part.strip(), spec, [device.pool for device in devices]):
            pool = part.strip().partition(":")[0]
            pool_index = sum(device.pool == pool for device in devices)
            devices.append(Device(index=len(devices), pool=pool, pool_index=pool_index, memory_bytes=memory_bytes))
    return tuple(devices)


def _memory_of(part: str, spec: str, seen: list[str]) -> list[int]:
    """Bytes of each device that a part of a spec names."""
    match = _POOL.fullmatch(part)
    if match is None or match["count"] == "0" or match["pool"] in seen:
        raise UserError(f"cluster.devices = {spec!r}: write auto, or each kind once with a count, such as cpu:2.")
    count = int(match["count"]) if match["count"] else None
    if match["pool"] == "cpu":
        count = count or _num_cores()
        return [host_memory_bytes() // count] * count
    if match["pool"] != "cuda":
        raise UserError(
            f"cluster.devices = {spec!r}: unknown kind {match['pool']!r}.{nearest(match['pool'], ['cpu', 'cuda'])}"
        )
    found = _gpu_memory()
    if len(found) < (count or 1):
        raise UserError(
            f"cluster.devices = {spec!r}: this machine has {len(found)} GPUs that torch can use. "
            f"Ask for what is there, for `auto`, or for CPU cores: cpu:{_num_cores()}."
        )
    return found[:count]


def _gpu_memory() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def _num_cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
