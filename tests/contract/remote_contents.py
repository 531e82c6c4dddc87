"""A script that reads contents of a rank on another machine of a Ray cluster, and prints the results."""

import asyncio
import gc
import os

from interlace.core.errors import RemoteError, WorkerDiedError
from interlace.run.clusters.ray import open_cluster
from interlace.run.recipe.sections import ClusterConfig
from interlace.runtime.cluster import Cluster
from interlace.runtime.ray.rank import RemoteContent
from interlace.schedule.schedule import Schedule
from tests.contract.payload_workers import Camera, Learner


async def body(cluster: Cluster) -> None:
    learners = [await cluster.start(f"learner{place}", Learner, on=str(place), may_die=True) for place in range(2)]
    cameras = [await cluster.start(f"camera{place}", Camera, on=str(place), may_die=True) for place in range(2)]
    pictures = [[await camera.take(number) for number in range(3)] for camera in cameras]
    for place in range(2):
        contents = [picture.content for picture in pictures[place]]
        print(f"camera {place} stores remotely:", all(isinstance(content, RemoteContent) for content in contents))
        for reader, learner in enumerate(learners):
            print(f"learner {reader} reads camera {place}:", await learner.learn(pictures[place]))
    [remote] = [place for place in range(2) if isinstance(pictures[place][0].content, RemoteContent)]
    for reader, learner in enumerate(learners):
        passed_on = [*await learner.pass_on(pictures[remote]), *await learner.pass_on(pictures[remote])]
        print(f"learner {reader} reads what it passed on:", await learner.learn(passed_on))
    del passed_on
    first, *others = pictures[remote]
    others.append(await cameras[remote].take(7))  # which no reader fetched
    print("read here:", float(first.content.read().mean()))
    print("lost before the death:", any(picture.content.is_lost for picture in others))
    try:
        await cameras[remote].take_and_die()
    except WorkerDiedError:
        print("lost with the camera:", all(picture.content.is_lost for picture in others))
    try:
        await learners[1 - remote].learn(others[-1:])
    except RemoteError as error:
        print("a reader fails:", "PayloadLostError" in error.remote_traceback)
    del pictures, first, others
    gc.collect()


async def main() -> None:
    config = ClusterConfig(backend="ray", devices="cpu:2", address=os.environ["RAY_ADDRESS"])
    cluster = open_cluster(config, Schedule())
    try:
        await cluster.run(body(cluster))
    finally:
        await cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
