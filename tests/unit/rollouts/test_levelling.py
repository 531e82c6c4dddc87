"""Requests queued for a draining engine move to an updated engine; begun sequences stay."""

import asyncio

import pytest

from interlace.core.types import Request, Response, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.models.tiny import build_tiny
from interlace.rollouts.dispatcher import Dispatcher
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
from tests.support.episode_runs import OneEngine
from tests.support.sim_run import Record, check, simulate
from tests.unit.stages.test_preset_mechanisms import LONG, load_schedule, mixed

SCHEDULE = Schedule(on_update="drain", max_staleness=1)


def asked(name: str, tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=tokens)
    return Request(uid=name, owner=SampleKey(0, 0), prompt_ids=[3, 4, 5], params=params)


def test_a_request_waits_for_no_engine_that_drains_where_another_may_start_it() -> None:
    model = build_tiny("micro", seed=0)[0]
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig()))

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE, config=NativeConfig(steps_per_schedule=1)).pool(cluster, 2)

        async def answered(name: str, tokens: int) -> Response:
            [found] = await pool.complete([asked(name, tokens)], who="test")
            return found

        def publish(version: int) -> None:
            pool.update_weights(WeightRef(version=version, parts=(writer.write(version, model.state_dict()),)))

        publish(0)
        await pool.swapped(0)
        slow, quick = (asyncio.create_task(answered(f"begun {tokens}", tokens)) for tokens in (400, 30))
        while not all(driver.jobs.running for driver in pool.drivers):
            await asyncio.sleep(0)
        publish(1)
        queued = [asyncio.create_task(answered(f"queued {number}", 4)) for number in range(6)]
        found = await asyncio.gather(quick, *queued)
        assert not slow.done(), "they waited for the engine that drains"
        assert [{*each.versions} for each in found] == [{0}, *[{1}] * 6]
        assert {*(await slow).versions} == {0}

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_a_long_tail_under_drain_takes_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Record:
        schedule = load_schedule("laminar", {"concurrency": 4})
        record = simulate(schedule, LONG)
        check(record, LONG, schedule.staleness_bound)
        return record

    levelled = run()
    assert not mixed(levelled), "a sequence ends under the version it began with"
    monkeypatch.setattr(Dispatcher, "fill", lambda *_: None)

    assert levelled.seconds < 0.97 * (alone := run().seconds), (levelled.seconds, alone)
