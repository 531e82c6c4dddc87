"""A script that joins two Ray nodes on this machine by address, like a real cluster, and prints the results."""

import asyncio
from typing import Any

import ray
from ray.cluster_utils import Cluster as Nodes

from interlace.run.clusters.ray import open_cluster
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import Worker, WorkerSpec, operation
from interlace.schedule.schedule import Schedule


class Located(Worker):
    """Knows its node."""

    @operation(on_device=False, collect="all")
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


async def body(cluster: Cluster) -> None:
    spec = WorkerSpec(name="a", factory=Located, worker_class=Located, devices=cluster.devices, num_ranks=2)
    found: list[Any] = await (await cluster.launch(spec)).node()
    print("nodes:", len(set(found)))


async def main(address: str) -> None:
    cluster = open_cluster(ClusterConfig(backend="ray", devices="cpu:2", address=address), Schedule())
    try:
        await cluster.run(body(cluster))
    finally:
        await cluster.shutdown()


if __name__ == "__main__":
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    try:
        asyncio.run(main(nodes.address))
        print("left:", not ray.is_initialized())
    finally:
        nodes.shutdown()
