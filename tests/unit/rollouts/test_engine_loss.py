"""An engine whose process dies is replaced, and the pool continues as before."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from interlace.core.errors import WorkerDiedError
from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig
from interlace.models.tiny import build_tiny
from interlace.rollouts.lending import Lending
from interlace.rollouts.pool import EnginePool
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.worker import Restore, Revival
from interlace.schedule.schedule import Schedule
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
from tests.support.episode_runs import OneEngine

SCHEDULE = Schedule(on_update="abort_resume", max_staleness=1)


class MortalRank:
    """A rank that dies in one operation. It is replaced by the same engine without sequences."""

    def __init__(self, group: Any, dies_in: str) -> None:
        self._group, self._dies_in = group, dies_in
        [self._rank] = group.rank_set.ranks
        self._death: WorkerDiedError | None = None
        self.num_made = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        group.rank_set.ranks = (self,)
        group.rank_set.revival = Revival(make_ranks=self._make, find_death=self._find_death, repeats_calls=False)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        if method == self._dies_in:
            self._death = WorkerDiedError("rollout/0[rank 0] died")
        if self._death:
            raise self._death
        return await self._rank.call(method, args, kwargs)

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        self._rank.call_now(method, args)

    async def close(self) -> None:
        await self._rank.close()

    async def _find_death(self, within_s: float) -> WorkerDiedError | None:
        return self._death

    async def _make(self, reason: str, restore: Restore | None) -> Sequence[Rank]:
        await self.may_start.wait()
        self._death, self.num_made = None, self.num_made + 1
        await self._rank.call("abort", (), {})
        return (self._rank,)


def publish(pool: EnginePool, version: int) -> None:
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig()))
    weights = build_tiny("micro", seed=0)[0].state_dict()
    pool.update_weights(WeightRef(version=version, parts=(writer.write(version, weights),)))


def asked(name: str, tokens: int) -> Request:
    return Request(uid=name, owner=SampleKey(0, 0), prompt_ids=[3, 4, 5], params=SamplingParams(max_new_tokens=tokens))


@pytest.mark.parametrize("dies_in", ["abort", "update_weights", "engine_metrics"])
def test_a_death_while_new_weights_arrive_leaves_no_engine_with_pending_weights(dies_in: str) -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE, config=NativeConfig(steps_per_schedule=1)).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        answer = asyncio.create_task(pool.complete([asked("begun", 60)], who="test"))
        [driver] = pool.drivers
        while not driver.jobs.running:
            await asyncio.sleep(0)
        MortalRank(driver.group, dies_in)
        publish(pool, 1)
        [response] = await answer
        assert pool.membership.num_lost == 1
        assert response.versions[-1] == 1
        assert pool.weights.pending.num == 0

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), SCHEDULE, flow))


def test_an_engine_that_is_removed_during_its_recovery_does_not_return() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        driver = pool.drivers[1]
        rank = MortalRank(driver.group, "serve")
        rank.may_start.clear()
        await pool.complete([asked("first", 4), asked("second", 4)], who="test")
        assert [state.state for state in pool.membership.states()] == ["serving", "lost"]
        assert pool.membership.lost_devices == set(pool.drivers[1].group.device_indices)
        await pool.membership.remove(driver, drains=True)
        rank.may_start.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rank.num_made == 0, "a process was started for an engine that has left"

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_a_stall_of_the_run_is_resolved_during_the_recovery_of_an_engine() -> None:
    """A server may be lost for hours: suspended samples and partial granules would wait as long."""

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        rank = MortalRank(pool.drivers[1].group, "serve")
        rank.may_start.clear()
        await pool.complete([asked("first", 4), asked("second", 4)], who="test")
        assert [state.state for state in pool.membership.states()] == ["serving", "lost"]
        resolved = asyncio.Event()
        cluster.watchdog.on_stall(lambda: bool(resolved.set()))
        async with asyncio.timeout(60):
            await resolved.wait()
        rank.may_start.set()

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_an_engine_that_is_removed_during_a_swap_leaves_no_pending_weights() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        driver = pool.drivers[1]
        begun = asyncio.Event()

        class SlowRank(MortalRank):
            async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
                if method == "update_weights":
                    begun.set()
                    await asyncio.Event().wait()
                return await super().call(method, args, kwargs)

        SlowRank(driver.group, "")
        publish(pool, 1)
        await begun.wait()
        await pool.membership.remove(driver, drains=True)
        await pool.swapped(1)
        async with asyncio.timeout(60):  # the cancelled call of the driver ends a little later
            while pool.weights.pending.num:
                await asyncio.sleep(0)

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_a_request_that_is_withdrawn_while_no_engine_serves_is_not_generated_later() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        [driver] = pool.drivers
        rank = MortalRank(driver.group, "serve")
        rank.may_start.clear()
        withdrawn = asyncio.create_task(pool.complete([asked("withdrawn", 4)], who="test"))
        while not pool.membership.num_lost:
            await asyncio.sleep(0)
        withdrawn.cancel()
        await asyncio.wait({withdrawn})
        rank.may_start.set()
        await pool.complete([asked("kept", 4)], who="test")
        assert sum(len(call.ended) for call in cluster.timeline.take().served) == 1

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), SCHEDULE, flow))


def test_the_trace_has_one_begin_of_a_turn_whose_first_call_was_lost() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        MortalRank(pool.drivers[0].group, "serve")
        await pool.complete([asked("lost", 4)], who="test")
        assert sum(len(call.begun) for call in cluster.timeline.take().served) == 1

    asyncio.run(run_on(ClusterConfig(devices="cpu:1"), SCHEDULE, flow))


def test_a_lent_engine_that_was_lost_joins_after_its_recovery_and_not_after_the_step() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE, config=NativeConfig(steps_per_schedule=1)).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        lent = pool.drivers[1]
        lending = Lending(pool.drivers, lent.group.device_indices, 0.5)
        answers = [asyncio.create_task(pool.complete([asked(name, 60)], who="test")) for name in ("one", "two")]
        while not lent.jobs.running:
            await asyncio.sleep(0)
        rank = MortalRank(lent.group, "abort")
        rank.may_start.clear()
        lending.look(1.0)
        while not pool.membership.num_lost:
            await asyncio.sleep(0)
        lending.renew()
        assert [state.state for state in pool.membership.states()] == ["serving", "lost"]
        assert lent.is_away, "it would take jobs without a process"
        rank.may_start.set()
        await asyncio.gather(*answers)
        while lent.is_away:
            await asyncio.sleep(0.01)

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_a_lent_engine_that_is_removed_during_a_step_does_not_join_after_it() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        lent = pool.drivers[1]
        lending = Lending(pool.drivers, lent.group.device_indices, 0.5)
        lending.look(1.0)
        await pool.membership.remove(lent, drains=True)
        lending.renew()
        async with asyncio.timeout(60):  # an engine that has left answers nothing
            await pool.complete([asked(name, 4) for name in ("one", "two", "three")], who="test")

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))


def test_an_engine_that_is_lost_while_it_leaves_does_not_join_after_its_recovery() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine(schedule=SCHEDULE, config=NativeConfig(steps_per_schedule=1)).pool(cluster, 1)
        publish(pool, 0)
        await pool.swapped(0)
        begun = asyncio.create_task(pool.complete([asked("first", 60), asked("second", 60)], who="test"))
        leaving = pool.drivers[1]
        while not leaving.jobs.running:
            await asyncio.sleep(0)
        MortalRank(leaving.group, "serve")
        removed = asyncio.create_task(pool.membership.remove(leaving, drains=True))
        await asyncio.sleep(0)
        publish(pool, 1)  # ends its call, and the next one finds the loss
        await removed
        assert pool.membership.num_lost == 1
        await begun
        async with asyncio.timeout(60):  # an engine that has left answers nothing
            await pool.complete([asked(name, 4) for name in ("one", "two", "three")], who="test")

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), SCHEDULE, flow))
