"""The controller finishes the reactions to one result before it processes the next."""

import asyncio
from itertools import groupby
from typing import Any

import pytest

from interlace.runtime.cluster import Cluster
from interlace.runtime.result_order import ResultOrder
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import CLUSTERS
from tests.contract.workers import Recorder


@pytest.mark.parametrize("name", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_what_a_result_sets_off_comes_to_rest_before_the_next_is_there(
    name: str, request: pytest.FixtureRequest
) -> None:
    log: list[int] = []

    async def body(cluster: Cluster) -> None:
        group: Any = await cluster.launch(WorkerSpec(name="a", factory=Recorder, worker_class=Recorder))

        async def follow(number: int) -> None:
            await group.together(8)
            for _ in range(20):
                log.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(follow(number) for number in range(8)))

    if name == "ray":
        request.getfixturevalue("ray_session")
    CLUSTERS[name](body, Schedule(), 100)
    assert [len(list(steps)) for _, steps in groupby(log)] == [20] * 8, "though all eight ended at the same moment"


def test_rest_is_told_once_all_results_have_passed_and_nothing_is_left_to_do() -> None:
    log: list[str] = []

    async def body() -> None:
        result_order = ResultOrder(lambda: log.append("rest"))

        async def follow(name: str) -> None:
            await result_order.wait_turn()
            for _ in range(5):
                await asyncio.sleep(0)
            log.append(name)

        for names in (["a", "b"], ["c"]):
            await asyncio.gather(*(follow(name) for name in names))
        await asyncio.sleep(0.01)

    asyncio.run(body())
    assert log == ["a", "b", "c", "rest"]


def test_who_is_never_at_rest_holds_nobody_up_for_good() -> None:
    async def body() -> None:
        async def spin() -> None:
            while True:
                await asyncio.sleep(0)

        spinning, result_order = asyncio.create_task(spin()), ResultOrder()
        await asyncio.gather(result_order.wait_turn(), result_order.wait_turn())
        spinning.cancel()

    asyncio.run(body())


def test_who_gives_up_waiting_holds_nobody_up() -> None:
    async def body() -> None:
        result_order = ResultOrder()
        gone, stays = asyncio.create_task(result_order.wait_turn()), asyncio.create_task(result_order.wait_turn())
        await asyncio.sleep(0)
        gone.cancel()
        await stays

    asyncio.run(body())
