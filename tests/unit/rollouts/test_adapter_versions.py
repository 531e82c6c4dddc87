"""With drain, a new adapter reaches an engine while sequences of the previous one continue."""

import asyncio

import pytest

from interlace.algorithms import create_algorithm
from interlace.core.progress import Draft
from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.engines.train import Adapter, LoraConfig, OptimizerConfig, TrainConfig, TrainEngine
from interlace.models.tiny import build_tiny
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
from tests.support.episode_runs import OneEngine
from tests.unit.engines.train.models import ragged_samples

pytest.importorskip("peft")


def trainer() -> TrainEngine:
    model = build_tiny("micro", seed=0)[0]
    return TrainEngine(
        model,
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2),
        config=TrainConfig(),
        adapter=Adapter(model, LoraConfig(rank=2), seed=0),
    )


def asked(name: str, tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=tokens)
    return Request(uid=name, owner=SampleKey(0, 0), prompt_ids=[3, 4, 5], params=params, streams=True)


def test_a_new_adapter_waits_for_no_sequence() -> None:
    engine, writer = trainer(), WeightWriter(Route(transport="alias", config=WeightsConfig(adapter="alone")))

    def written(version: int) -> WeightRef:
        return WeightRef(version=version, parts=(engine.write_weights(writer, version, copy=True),))

    async def flow(cluster: Cluster) -> None:
        # The model itself decodes: a step of the C++ decoder is so short that all 200 may be over before the swap.
        config = NativeConfig(steps_per_schedule=1, compile_decoder=False)
        one = OneEngine(schedule=Schedule(on_update="drain"), config=config)
        pool = await one.pool(cluster, 2)
        pool.update_weights(written(0))
        await pool.swapped(0)
        engine.accumulate(ragged_samples(6, 0))
        engine.optimizer_step()
        drawn = asyncio.Event()

        def on_draft(_: Draft) -> None:
            drawn.set()

        long = asyncio.create_task(pool.complete([asked("long", 200)], who="test", on_draft=on_draft))
        await drawn.wait()
        pool.update_weights(written(1))
        await pool.swapped(1)
        assert not long.done(), "the swap waited for it"
        [short] = await pool.complete([asked("short", 4)], who="test")
        assert not long.done()
        assert {*short.versions} == {1}
        [found] = await long
        assert {*found.versions} == {0} and len(found.token_ids) == 200

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), Schedule(on_update="drain"), flow))
