"""An engine yields its devices to a later stage, at any time of the request."""

import asyncio
from typing import Any

import pytest

from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.models.tiny import build_tiny
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.runtime.rank import RankResult
from interlace.runtime.worker import Worker, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
from tests.support.episode_runs import OneEngine

SCHEDULE = Schedule(on_update="abort_resume", max_staleness=1, switch="when_ready")


class Trainer(Worker):
    """A worker that needs the engine's devices."""

    @operation(bin="train")
    def work(self) -> None:
        """Computes nothing."""


class GatedRank:
    """A rank of an engine that begins one operation only after `may_begin`, and counts calls of serve()."""

    def __init__(self, group: Any, method: str) -> None:
        [self._rank] = group.rank_set.ranks
        group.rank_set.ranks = (self,)
        self._method = method
        self.is_called, self.may_begin = asyncio.Event(), asyncio.Event()
        self.num_served = 0

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        if method == self._method:
            self.is_called.set()
            await self.may_begin.wait()
        self.num_served += method == "serve"
        return await self._rank.call(method, args, kwargs)

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        self._rank.call_now(method, args)

    async def close(self) -> None:
        await self._rank.close()


@pytest.mark.parametrize("method", ["onload", "update_weights"])
def test_devices_requested_before_the_engine_generates_are_yielded_without_a_call(method: str) -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE, config=NativeConfig(steps_per_schedule=1)).pool(cluster, 1)
        [driver] = pool.drivers
        rank = GatedRank(driver.group, method)
        spec = WorkerSpec(
            name="actor",
            factory=Trainer,
            worker_class=Trainer,
            devices=driver.group.devices,
            stage=driver.group.state.stage + 1,
        )
        actor = await cluster.launch(spec)
        params = SamplingParams(max_new_tokens=40)
        request = Request(uid="a", owner=SampleKey(0, 0), prompt_ids=[3, 4, 5], params=params)
        answer = asyncio.create_task(pool.complete([request], who="test"))
        written = WeightWriter(Route(transport="alias", config=WeightsConfig())).write(
            0, build_tiny("micro", seed=0)[0].state_dict()
        )
        pool.update_weights(WeightRef(version=0, parts=(written,)))
        await rank.is_called.wait()
        trained = asyncio.ensure_future(actor.work())
        await asyncio.sleep(0)
        assert cluster.lock.is_wanted(actor.device_indices)
        rank.may_begin.set()
        await trained
        assert rank.num_served == 0
        assert len((await answer)[0].token_ids) == 40

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), SCHEDULE, flow))
