"""Pictures are sent directly from the worker that takes them to the one that learns from them.

The controller sends only the numbers of the pictures; it never receives the pictures, of a megabyte each.

    python examples/straight_through.py
"""

import asyncio

import numpy as np

from interlace.run.clusters.base import run_flow
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import Worker, operation

NUM_PICTURES, SHAPE = 20, (512, 512, 4)


class Camera(Worker):
    """Takes pictures of a grey that grows lighter."""

    @operation(bin="generate")
    def take(self, number: int) -> None:
        self.context.send("learner.0", np.full(SHAPE, number, np.uint8), tag="pictures")


class Learner(Worker):
    """Learns the mean grey."""

    @operation(bin="train")
    def learn(self) -> float:
        return float(self.context.recv("camera.0", tag="pictures").mean())


async def flow(cluster: Cluster) -> None:
    """Takes the next picture while the learner processes the last."""
    camera = await cluster.start("camera", Camera, on="0")
    learner = await cluster.start("learner", Learner, on="1")
    taken = [camera.take(number) for number in range(NUM_PICTURES)]
    found = [await learner.learn() for _ in range(NUM_PICTURES)]
    await asyncio.gather(*taken)
    print(f"mean grey {sum(found) / len(found):.1f} of {len(found)} pictures")


if __name__ == "__main__":
    asyncio.run(run_flow(flow, devices="cpu:2"))
