"""The clusters that the contract is checked against. A new back end is one more entry."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from interlace.runtime.cluster import Cluster
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

T = TypeVar("T")
Body = Callable[[Cluster], Awaitable[T]]


def two_devices(memory_bytes: int = 100) -> tuple[Device, ...]:
    return tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=memory_bytes) for i in range(2))


async def _with(kind: type[Cluster], body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    cluster = kind(two_devices(memory_bytes), schedule, hang_after_s=60)
    try:
        return await cluster.run(body(cluster))
    finally:
        await cluster.shutdown()


def run_local(body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    return asyncio.run(_with(LocalCluster, body, schedule, memory_bytes))


def run_sim(body: Body[T], schedule: Schedule, memory_bytes: int) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_with(SimCluster, body, schedule, memory_bytes))
    finally:
        loop.on_stall = lambda: True
        loop.close()


CLUSTERS = {"local": run_local, "sim": run_sim}
