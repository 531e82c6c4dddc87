"""Episodes over the real engine, on one device of a local cluster."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from interlace.core.types import JSON, Prompt, Sample, SampleKey, SamplingParams
from interlace.engines.rollout import NativeEngine
from interlace.episodes.base import Episode
from interlace.models.tiny import build_tiny
from interlace.recipes.clusters.base import ClusterConfig, run_on
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.worker import WorkerContext
from interlace.schedule.schedule import Schedule
from interlace.stages.generate import GenerateStage
from interlace.stages.pool import EnginePool
from interlace.stages.session import NO_LIMITS, SessionLimits
from interlace.stages.stream import ADMITTED, GENERATED
from interlace.workers.rollout import RolloutBundle, RolloutWorker

PARAMS = SamplingParams(max_new_tokens=12)


def samples_of(
    episode: Episode | Callable[[Cluster], Episode],
    failures: dict[SampleKey, str],
    num_prompts: int = 3,
    backend: str = "local",
    *,
    model: str = "micro",
    params: SamplingParams = PARAMS,
    limits: SessionLimits = NO_LIMITS,
    columns: Mapping[str, JSON] = MappingProxyType({}),
) -> list[Sample]:
    """All samples of a wave, two a prompt, on one device of a local cluster. episode: or what makes one there."""

    def bundle(_context: WorkerContext) -> RolloutBundle:
        built, tokenizer = build_tiny(model, seed=0)
        return RolloutBundle(
            engine=NativeEngine(built, tokenizer=tokenizer), tokenizer=tokenizer, stop_token_ids=params.stop_token_ids
        )

    async def flow(cluster: Cluster) -> list[Sample]:
        spec = WorkerSpec(
            name="rollout/0",
            factory=lambda context: RolloutWorker(context, bundle),
            worker_class=RolloutWorker,
            devices=cluster.place("rollout")[0],
            preemptible=True,
        )
        pool = EnginePool(
            cluster,
            [await cluster.launch(spec)],
            Schedule(),
            samples_per_step=2 * num_prompts,
            expected_tokens=params.max_new_tokens,
            on_suspended=lambda: None,
        )
        channel = Channel[SampleKey, Sample]("samples", Sample, cluster.waits)
        runs = episode if hasattr(episode, "run") else episode(cluster)
        stage = GenerateStage(
            cluster,
            pool,
            runs,
            params,
            channel,
            limits=limits,
            on_generated=lambda _key: None,
            on_failed=failures.__setitem__,
        )
        reader = channel.subscribe("reader", GENERATED)
        wave = [
            Sample(
                key=SampleKey(gid, index),
                prompt=Prompt(
                    uid=f"p{gid}",
                    token_ids=np.arange(3, 9 + gid, dtype=np.int32),
                    text="",
                    answer="",
                    metadata={"index": index, **columns},
                ),
            )
            for gid in range(num_prompts)
            for index in range(2)
        ]
        for sample in wave:
            channel.open(sample.key, sample, ADMITTED)
        channel.close()
        pool.start()
        stage.generate(wave)
        return sorted([row async for _, row in reader.rows()], key=lambda row: row.key)

    config = ClusterConfig(backend=backend, devices="cpu:1")
    return asyncio.run(run_on(config, Schedule(), flow))
