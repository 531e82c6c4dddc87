"""Episodes on the real engine, on one device of a local cluster."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from interlace.core.types import JSON, Prompt, Sample, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.tiny import build_tiny
from interlace.rollouts.base import Episode
from interlace.rollouts.generate import GenerateStage
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.session import NO_LIMITS, SessionLimits
from interlace.rollouts.stream import ADMITTED, GENERATED
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerContext, WorkerSpec
from interlace.schedule.schedule import Schedule
from interlace.workers.rollout import RolloutBundle, RolloutWorker

PARAMS = SamplingParams(max_new_tokens=12)


@dataclass(frozen=True, kw_only=True)
class OneEngine:
    """An engine with a tiny model, and the settings of its episodes."""

    model: str = "micro"
    config: NativeConfig = NativeConfig()
    schedule: Schedule = Schedule()
    params: SamplingParams = PARAMS
    limits: SessionLimits = NO_LIMITS

    async def pool(self, cluster: Cluster, num_samples: int) -> EnginePool:
        """Starts one such engine on each placement of the schedule. Returns the pool."""
        specs = [
            WorkerSpec(
                name=f"rollout/{number}",
                factory=lambda context: RolloutWorker(context, self._bundle),
                worker_class=RolloutWorker,
                devices=devices,
                preemptible=True,
            )
            for number, devices in enumerate(cluster.place("rollout"))
        ]
        pool = EnginePool(
            cluster,
            [await cluster.launch(spec) for spec in specs],
            self.schedule,
            samples_per_step=num_samples,
            expected_tokens=self.params.max_new_tokens,
            on_suspended=lambda: None,
        )
        pool.start()
        return pool

    def _bundle(self, _context: WorkerContext) -> RolloutBundle:
        model, tokenizer = build_tiny(self.model, seed=0)
        engine = NativeEngine(model, config=self.config, tokenizer=tokenizer)
        return RolloutBundle(engine=engine, tokenizer=tokenizer, stop_token_ids=self.params.stop_token_ids)

    async def play(
        self, pool: EnginePool, cluster: Cluster, episode: Episode, wave: Sequence[Sample]
    ) -> tuple[list[Sample], dict[SampleKey, str]]:
        """Runs a wave to its end. Returns the finished samples, and the reasons of the failed ones."""
        failures: dict[SampleKey, str] = {}
        channel = Channel[SampleKey, Sample]("samples", Sample, cluster.waits)
        stage = GenerateStage(
            cluster,
            pool,
            episode,
            self.params,
            channel,
            limits=self.limits,
            on_generated=lambda _key: None,
            on_failed=lambda key, failure: bool(failures.update({key: failure.reason})),
        )
        reader = channel.subscribe("reader", GENERATED)
        for sample in wave:
            channel.open(sample.key, sample, ADMITTED)
        channel.close()
        stage.generate(wave)
        return [row async for _, row in reader.rows()], failures


def samples_of(
    episode: Episode | Callable[[Cluster], Episode],
    failures: dict[SampleKey, str],
    num_prompts: int = 3,
    backend: str = "local",
    *,
    engine: OneEngine = OneEngine(),
    columns: Mapping[str, JSON] = MappingProxyType({}),
) -> list[Sample]:
    """Returns all samples of a wave with two samples per prompt.

    episode: an episode, or a function that makes one on the cluster. columns: metadata of each row.
    """

    def prompt(gid: int, index: int) -> Prompt:
        token_ids = np.arange(3, 9 + gid, dtype=np.int32)
        return Prompt(uid=f"p{gid}", token_ids=token_ids, text="", answer="", metadata={"index": index, **columns})

    async def flow(cluster: Cluster) -> list[Sample]:
        wave = [
            Sample(key=SampleKey(gid, index), prompt=prompt(gid, index))
            for gid in range(num_prompts)
            for index in range(2)
        ]
        pool = await engine.pool(cluster, len(wave))
        runs = episode if hasattr(episode, "run") else episode(cluster)
        rows, found = await engine.play(pool, cluster, runs, wave)
        failures.update(found)
        return sorted(rows, key=lambda row: row.key)

    config = ClusterConfig(backend=backend, devices="cpu:1")
    return asyncio.run(run_on(config, Schedule(), flow))
