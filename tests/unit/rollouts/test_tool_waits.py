"""The wait of an idle device for tools is distinguished from the tail and from a stall."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from interlace.core.types import Prompt, SampleKey
from interlace.flows.run import SINGLE_TURN
from interlace.observe.goodput import BINS, PREFIX
from interlace.rollouts.base import Session
from interlace.rollouts.dispatcher import ToolWaits
from interlace.rollouts.driver import EngineDriver
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import OneEngine
from tests.support.sim_run import Record, Workload, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=2, num_steps=3, num_devices=3)
SPLIT = Schedule.parse({"placement": {"actor": 0, "rollout": "1-2"}})


@dataclass
class Searches:
    """Two turns with a tool between."""

    tool_s: float
    is_named: bool = True

    async def run(self, prompt: Prompt, session: Session) -> float:
        turn = await session.generate(prompt.token_ids.tolist())
        if self.is_named:
            async with session.waiting("a search"):
                await asyncio.sleep(self.tool_s)
        else:
            await asyncio.sleep(self.tool_s)
        await session.generate([*prompt.token_ids.tolist(), *turn.token_ids.tolist(), 7])
        return 1.0


def shares(record: Record, name: str) -> list[float]:
    return [result.metrics[f"{PREFIX}{name}"] for result in record.results]


@pytest.mark.parametrize("is_named", [True, False])
def test_engines_that_wait_for_tools_are_in_a_bin_of_their_own(is_named: bool) -> None:
    record = simulate(SPLIT, replace(WORK, episode=Searches(tool_s=1000.0, is_named=is_named)))
    # Two engines of three devices wait nearly all the time; the trainer's waits for them.
    for tool_wait, pipeline, tail in zip(
        *(shares(record, name) for name in ("tool_wait", "pipeline_bubble", "tail_bubble")), strict=True
    ):
        assert tool_wait == pytest.approx(2 / 3, abs=0.1) and tail < 0.05 and pipeline < 0.2


def test_the_tail_stays_the_tail() -> None:
    single, quick = (simulate(SPLIT, replace(WORK, episode=each)) for each in (SINGLE_TURN, Searches(tool_s=0.0)))
    assert shares(single, "tool_wait") == [0.0] * 3 and sum(shares(single, "tail_bubble")) > 0
    assert sum(shares(quick, "tool_wait")) < 1e-6 and sum(shares(quick, "tail_bubble")) > 0


def test_every_device_second_is_in_one_bin() -> None:
    record = simulate(SPLIT, replace(WORK, episode=Searches(tool_s=3.0)))
    for result in record.results:
        assert sum(result.metrics[f"{PREFIX}{name}"] for name in BINS) == pytest.approx(1)


def test_an_engine_that_has_left_waits_for_no_tool() -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        pool.admit([SampleKey(0, 0)], as_episodes=True)
        assert len(cluster.timeline.take().waits) == 2
        await pool.membership.remove(pool.drivers[1], drains=True)
        assert len(cluster.timeline.take().waits) == 2, "its wait ended, the other's is open"
        pool.cancel(SampleKey(0, 0))
        cluster.timeline.take()
        assert not cluster.timeline.take().waits, "a wait that is open is reported again"

    asyncio.run(run_on(ClusterConfig(devices="cpu:2"), Schedule(), flow))


class CheckedWaits(ToolWaits):
    """Compares the waits after each look with those of all engines."""

    num_looks = 0

    def look(self, changed: Iterable[EngineDriver | None]) -> None:
        super().look(changed)
        everywhere = self._away[None] > 0
        waiting = {each for each in self._drivers if not each.load.num_requests and (everywhere or self._away[each])}
        assert self._open.keys() == waiting
        CheckedWaits.num_looks += 1


@pytest.mark.parametrize("preset", ["areal", "verl-colocated", "rlhfuse", "laminar", "one-step-off"])
def test_a_look_at_the_changed_engines_finds_all_waits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.rollouts.dispatcher.ToolWaits", CheckedWaits)
    CheckedWaits.num_looks = 0
    schedule = load_schedule(preset).model_copy(update={"placement": SPLIT.placement})
    simulate(schedule, replace(WORK, episode=Searches(tool_s=3.0)))
    assert CheckedWaits.num_looks > 50
