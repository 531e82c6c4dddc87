"""Workers use channels directly, and rows of a dead rank are made again or end as `failed`."""

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from interlace.core.errors import RemoteError, UserError, WorkerDiedError
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.process.exchange import Exchange
from interlace.runtime.worker import Worker, operation
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import CLUSTERS

NUM_NUMBERS = 1 << 17
"""Half a megabyte a row: it goes through shared memory between processes."""
KINDS = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


class Rank(Worker):
    @operation(on_device=False, collect="all")
    def process(self) -> int:
        return os.getpid()


class Camera(Rank):
    """Makes rows."""

    @operation(on_device=False, collect="all")
    def put(self, keys: list[int]) -> None:
        for key in keys:
            if key % self.context.num_ranks == self.context.rank:
                self.context.channel("pictures").put(key, np.full(NUM_NUMBERS, key, np.int32))


class Learner(Rank):
    """Reads rows to the end of the channel."""

    @operation(on_device=False, collect="all")
    def learn(self, at_most: int = 1 << 30) -> list[int]:
        found: list[int] = []
        while len(found) < at_most and (row := self.context.channel("pictures").get()):
            key, picture = row
            assert (picture == key).all() and len(picture) == NUM_NUMBERS
            found.append(key)
        return found


def run(kind: str, request: pytest.FixtureRequest, body: Any) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_session")
    CLUSTERS[kind](body, Schedule(), 100)


async def start(cluster: Cluster, name: str, worker: type[Worker], ranks: int, *, may_die: bool = False) -> Any:
    return await cluster.launch(
        WorkerSpec(
            name=name, factory=worker, worker_class=worker, devices=cluster.devices[:ranks], num_ranks=ranks,
            may_die=may_die,
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)], ids=["alone", "by two"])
def test_each_row_reaches_its_reader_once_in_order(
    kind: str, ranks: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    async def body(cluster: Cluster) -> None:
        cameras = await start(cluster, "camera", Camera, ranks[0])
        learners = await start(cluster, "learner", Learner, ranks[1])
        channel = cluster.open_channel(
            "pictures",
            writers=[f"camera.{rank}" for rank in range(ranks[0])],
            readers=[f"learner.{rank}" for rank in range(ranks[1])],
            num_rows=12,
        )
        learning = learners.learn()
        await cameras.put([6, 7, 4, 5, 2, 3])  # the order in which rows are made is not that in which they are read
        await cameras.put([0, 1, 10, 11, 8, 9])
        found = await learning
        assert found == [list(range(rank, 12, ranks[1])) for rank in range(ranks[1])]
        assert not await channel.finished() and not len(channel.rows)
        with pytest.raises((RemoteError, UserError), match="it is there already, or has ended"):
            await cameras.put([0])

    run(kind, request, body)


def open_between(cluster: Cluster, **settings: Any) -> Exchange:
    return cluster.open_channel(
        "pictures", writers=("mortal.0", "camera.0"), readers=("learner.0",), num_rows=6, **settings
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made_again", [False, True], ids=["failed", "made again"])
def test_rows_of_a_killed_holder(kind: str, made_again: bool, request: pytest.FixtureRequest) -> None:
    async def body(cluster: Cluster) -> None:
        mortal = await start(cluster, "mortal", Camera, 1, may_die=True)
        camera, learner = await start(cluster, "camera", Camera, 1), await start(cluster, "learner", Learner, 1)
        again: list[Any] = []

        def on_lost(key: int, reason: str) -> bool:
            assert "mortal" in reason
            again.append(camera.put([key]))
            return True

        channel = open_between(cluster, on_lost=on_lost if made_again else None)
        await mortal.put([0, 2])
        assert await learner.learn(1) == [[0]]
        os.kill((await mortal.process())[0], signal.SIGKILL)  # holds row 2, and owes row 4
        learning = learner.learn()
        await camera.put([1, 3, 5])
        assert await learning == [[1, 2, 3, 4, 5] if made_again else [1, 3, 5]]
        await asyncio.gather(*again)
        failed = await channel.finished()
        assert list(failed) == ([] if made_again else [2, 4])
        assert all("mortal" in reason for reason in failed.values())
        with pytest.raises(WorkerDiedError, match="mortal"):
            await mortal.process()

    run(kind, request, body)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_reader_was_given_goes_to_another(kind: str, request: pytest.FixtureRequest) -> None:
    async def body(cluster: Cluster) -> None:
        camera, learner = await start(cluster, "camera", Camera, 1), await start(cluster, "learner", Learner, 1)
        mortal = await start(cluster, "mortal", Learner, 1, may_die=True)
        channel = cluster.open_channel("pictures", writers=("camera.0",), readers=("mortal.0", "learner.0"), num_rows=4)
        await camera.put([0, 1, 2, 3])
        assert await mortal.learn(1) == [[0]]
        os.kill((await mortal.process())[0], signal.SIGKILL)
        assert sorted((await learner.learn())[0]) == [0, 1, 2, 3]
        assert not await channel.finished()

    run(kind, request, body)
