"""Cluster back end for the devices of this machine."""

import os

from interlace.core.errors import UserError
from interlace.core.host_memory import host_memory_bytes
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.machine import Machine, find_slots
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


def open_cluster(config: ClusterConfig, schedule: Schedule) -> LocalCluster:
    """Opens the cluster of a run. Must be called in the running event loop."""
    return LocalCluster(find_devices(config), schedule, hang_after_s=config.hang_after_s)


def find_devices(config: ClusterConfig) -> tuple[Device, ...]:
    """Finds the devices of `cluster.devices`. Raises UserError for an invalid value and for missing devices."""
    if config.address is not None:
        raise UserError(f"cluster.address = {config.address!r}, but cluster=local joins nothing. Set cluster=ray.")
    return tuple(slot.device for slot in find_slots(config.devices, [this_machine()]))


def this_machine() -> Machine:
    """Returns the cores, memory and GPUs that this process may use."""
    return Machine(num_cores=_num_cores(), memory_bytes=host_memory_bytes(), gpu_bytes=_gpu_bytes())


def _gpu_bytes() -> tuple[int, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def _num_cores() -> int:
    """Counts the cores that this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
