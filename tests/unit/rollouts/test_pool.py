"""Metrics of several engines: sums, and means of shares."""

import asyncio

import pytest

from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import OneEngine


def test_shares_of_engines_are_averaged() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        first, second = pool.drivers
        first.metrics = {"kv_use": 0.5, "draft_tokens": 10.0, "draft_acceptance": 0.5, "num_steps": 7.0}
        second.metrics = {"kv_use": 0.7, "draft_tokens": 30.0, "draft_acceptance": 0.1, "num_steps": 9.0}
        found = pool.engine_metrics()
        assert (found["num_steps"], found["draft_tokens"]) == (16.0, 40.0)
        assert found["kv_use"] == pytest.approx(0.6)
        assert found["draft_acceptance"] == pytest.approx((5 + 3) / 40)

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), Schedule(), flow))
