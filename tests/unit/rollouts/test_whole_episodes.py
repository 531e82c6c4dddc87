"""Admission of whole episodes on the native engine: `concurrency: episodes`."""

import asyncio

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.rollouts.base import Session
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.concurrency import EpisodeLimit
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import OneEngine
from tests.support.worker_episodes import ThreeTurns

TURNS, EPISODES, TOOL_TOKENS = 4, 12, 30
MAX_TOKENS = 1200
"""Room for the whole contexts of four samples: 158 tokens, for which the engine reserves 256 cells."""


class ToolUser:
    """Episode of several turns. Its tool lets the turns of other samples begin."""

    async def run(self, prompt: Prompt, session: Session) -> float:
        context = prompt.token_ids.tolist()
        for number in range(TURNS):
            turn = await session.generate(context)
            async with session.waiting("a tool"):
                await asyncio.sleep(0.002)
            context = [*context, *turn.token_ids.tolist(), *range(3 + number, 3 + number + TOOL_TOKENS)]
        return 1.0


def make_prompt(gid: int) -> Prompt:
    """Returns a prompt that shares no beginning with others."""
    token_ids = np.random.default_rng(gid).integers(3, 90, 20).astype(np.int32)
    return Prompt(uid=f"p{gid}", token_ids=token_ids, text="", answer="")


def play(concurrency: object) -> tuple[list[Sample], float]:
    """Returns the samples, and the share of earlier turns' tokens that the engine reused."""
    engine = OneEngine(
        config=NativeConfig(max_running=EPISODES, max_tokens=MAX_TOKENS),
        schedule=Schedule.parse({"concurrency": concurrency}),
        params=SamplingParams(max_new_tokens=12),
    )

    async def flow(cluster: Cluster) -> tuple[list[Sample], float]:
        wave = [Sample(key=SampleKey(gid, 0), prompt=make_prompt(gid)) for gid in range(EPISODES)]
        pool = await engine.pool(cluster, EPISODES)
        rows, failures = await engine.play(pool, cluster, ToolUser(), wave)
        assert not failures
        return sorted(rows, key=lambda row: row.key), pool.engine_metrics()["history_reused"]

    return asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


def test_whole_episodes_keep_their_contexts_and_get_the_same_samples() -> None:
    thrashing, lost = play(None)
    whole, found = play({"kind": "episodes", "kv_tokens": MAX_TOKENS // 2})
    measured, _ = play({"kind": "episodes", "initial": 2})
    assert 2 * lost < found
    tokens = [[row.token_ids.tolist() for row in rows] for rows in (thrashing, whole, measured)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("budget", [None, 8])
def test_no_context_counts_after_its_sample(budget: int | None) -> None:
    """Concurrent turns of a sample end on two engines; a suspended one leaves its engine."""
    limit = {"kind": "episodes", "kv_tokens": 1000, "share": 1.0}
    fields = {"concurrency": limit, "rollout_budget": budget, "on_update": "keep", "max_staleness": 1}
    engine = OneEngine(schedule=Schedule.parse(fields))

    async def flow(cluster: Cluster) -> None:
        wave = [Sample(key=SampleKey(gid, 0), prompt=make_prompt(gid)) for gid in range(EPISODES)]
        pool = await engine.pool(cluster, EPISODES)

        async def renew() -> None:
            while True:
                await asyncio.sleep(0.01)
                pool.resume()

        renewal = asyncio.create_task(renew())
        rows, failures = await engine.play(pool, cluster, ThreeTurns(), wave)
        renewal.cancel()
        assert not failures and len(rows) == EPISODES
        assert len(pool.drivers) == 2
        for driver in pool.drivers:
            assert isinstance(driver.calls.limit, EpisodeLimit)
            assert driver.calls.limit.admits(SampleKey(99, 0), 1000, 0), "nothing is kept"

    asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:2"), engine.schedule, flow))
