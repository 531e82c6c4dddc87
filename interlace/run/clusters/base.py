"""Opens cluster back ends by name."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, cast

from interlace.core.plugins import find_part
from interlace.run import clusters
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.cluster import Cluster
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

T = TypeVar("T")


class BackEnd(Protocol):
    """Interface of each module of this folder, and of a user's class."""

    def open_cluster(self, config: ClusterConfig, schedule: Schedule) -> Cluster:
        """Opens the cluster of a run. Must be called in the running event loop."""

    def find_devices(self, config: ClusterConfig) -> tuple[Device, ...]:
        """Returns the devices of the cluster before it is opened. Raises UserError for devices that do not exist."""


def back_end(config: ClusterConfig) -> BackEnd:
    """Returns the back end of a config: a built-in module, or the user's `package.module:Name`. Raises UserError."""
    return cast("BackEnd", find_part("cluster back end", clusters, config.backend, ("open_cluster", "find_devices")))


async def run_flow(flow: Callable[[Cluster], Awaitable[T]], *, backend: str = "local", devices: str = "auto") -> T:
    """Runs a user's flow on a cluster and shuts the cluster down. backend, devices: as in a recipe's `cluster`."""
    return await run_on(ClusterConfig(backend=backend, devices=devices), Schedule(), flow)


async def run_on(config: ClusterConfig, schedule: Schedule, flow: Callable[[Cluster], Awaitable[T]]) -> T:
    """Opens a cluster, runs a flow on it, and shuts it down."""
    cluster = back_end(config).open_cluster(config, schedule)
    try:
        return await cluster.run(flow(cluster))
    finally:
        await cluster.shutdown()
