"""Cluster back end for a Ray cluster: an existing one, or one started on this machine for the run."""

import functools
import time
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.run.clusters.local import this_machine
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.machine import Machine, find_slots
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

if TYPE_CHECKING:
    from types import ModuleType

    from interlace.runtime.ray.cluster import RayCluster


LISTED_S = 60.0
"""Seconds for which a list of machines is used again by checks: joining takes seconds, and a sweep checks each run."""


def open_cluster(config: ClusterConfig, schedule: Schedule) -> "RayCluster":
    """Joins or starts Ray, and reserves the devices. Must be called in the running event loop."""
    cluster_of = _import_ray().RayCluster
    from interlace.runtime.ray.session import RaySession

    _list_machines.cache_clear()  # a run looks for its machines again after it has lost one
    session = RaySession.open(config.address, this_machine())
    try:
        slots = find_slots(config.devices, session.machines(this_machine))
        limits = {"hang_after_s": config.hang_after_s, "start_within_s": config.start_timeout_s}
        return cluster_of(session, slots, schedule, **limits)
    except BaseException:
        session.close()
        raise


def find_devices(config: ClusterConfig) -> tuple[Device, ...]:
    """Returns the devices of `cluster.devices`. Raises UserError if Ray or a device is missing."""
    _import_ray()
    machines = [this_machine()]
    if config.address is not None:
        machines = _list_machines(config.address, int(time.monotonic() // LISTED_S))
    return tuple(slot.device for slot in find_slots(config.devices, machines))


@functools.lru_cache(maxsize=1)
def _list_machines(address: str, _period: int) -> list[Machine]:
    """Joins the cluster and lists its machines. _period: number of the time span for which the list is used."""
    from interlace.runtime.ray.session import RaySession

    session = RaySession.open(address, this_machine())
    try:
        return session.machines(this_machine)
    finally:
        session.close()


def _import_ray() -> "ModuleType":
    try:
        from interlace.runtime.ray import cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("cluster=ray needs Ray, which is not installed: pip install 'interlace[ray]'.") from None
    return cluster
