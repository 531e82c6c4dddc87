"""The clusters that the contract is tested against. A new back end is one more entry."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from interlace.runtime.cluster import Cluster
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.machine import DeviceSlot
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

WITH_TORCH = ("tests.support.rank_pair",)
"""Module of the fork server that other tests of ranks use too."""
T = TypeVar("T")
Body = Callable[[Cluster], Awaitable[T]]


def two_devices(memory_bytes: int = 100) -> tuple[Device, ...]:
    return tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=memory_bytes) for i in range(2))


async def _with(make: Callable[[], Cluster], body: Body[T]) -> T:
    cluster = make()
    try:
        return await cluster.run(body(cluster))
    finally:
        await cluster.shutdown()


def run_local(body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    return asyncio.run(_with(lambda: LocalCluster(two_devices(memory_bytes), schedule, hang_after_s=60), body))


def run_sim(body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    loop = VirtualLoop()
    try:
        make = lambda: SimCluster(two_devices(memory_bytes), schedule, hang_after_s=60)  # noqa: E731
        return loop.run_until_complete(_with(make, body))
    finally:
        loop.on_stall = lambda: True
        loop.close()


def run_ray(body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    """Within the Ray of this process, which starting takes seconds: the fixture `ray_session` keeps it over tests."""
    import ray

    from interlace.runtime.ray.cluster import RayCluster
    from interlace.runtime.ray.session import RaySession

    node = ray.nodes()[0]["NodeID"]
    slots = [DeviceSlot(device=device, machine=node, local_name=device.name) for device in two_devices(memory_bytes)]
    session = RaySession(is_own=False)
    return asyncio.run(_with(lambda: RayCluster(session, slots, schedule, hang_after_s=60), body))


CLUSTERS = {"local": run_local, "sim": run_sim, "ray": run_ray}
