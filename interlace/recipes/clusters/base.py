"""A back end by its name."""

from typing import Protocol, cast

from interlace.core.plugins import builtin_module
from interlace.recipes import clusters
from interlace.recipes.config import ClusterConfig
from interlace.runtime.cluster import Cluster
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


class BackEnd(Protocol):
    """What each module of this folder offers."""

    def open_cluster(self, config: ClusterConfig, schedule: Schedule) -> Cluster:
        """The cluster a run uses; call on the running event loop."""
        ...

    def find_devices(self, config: ClusterConfig) -> tuple[Device, ...]:
        """Its devices, before it is opened. Raises UserError for what cannot be had."""
        ...


def back_end(config: ClusterConfig) -> BackEnd:
    """The module that the config names."""
    return cast("BackEnd", builtin_module("cluster back end", clusters, config.backend))
