"""Greedy baselines of groups, on the virtual clock: each is measured once, and its failure is counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from interlace.algorithms.base import Needs
from interlace.core.errors import InterlaceError
from interlace.core.types import Request, Response, RewardResult, Sample, TerminalEvent
from interlace.flows.baseline import GreedyBaseline
from interlace.forecast.costs.workers import SimulatedReward
from interlace.rollouts.pool import EnginePool
from interlace.runtime.worker import operation
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=3, num_steps=5)


def test_a_greedy_baseline_is_measured_for_each_group() -> None:
    record = simulate(Schedule(), replace(WORK, needs=Needs(greedy_baseline=True)))
    assert [len(step) for step in record.trained] == [4] * 5


def test_no_greedy_baseline_of_a_dropped_group_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, held = GreedyBaseline.admitted, [0]

    def counted(self: GreedyBaseline, wave: Sequence[Sample]) -> None:
        admitted(self, wave)
        held.append(len(self._rewards) - len(self._admission.live_gids()))

    monkeypatch.setattr(GreedyBaseline, "admitted", counted)
    simulate(Schedule(), replace(WORK, costs=Costs(filter_share=0.5), needs=Needs(greedy_baseline=True), num_steps=9))
    assert max(held) == 0


def test_every_failed_sample_says_why_also_where_its_greedy_baseline_failed() -> None:
    costs = Costs(fail_share=0.3)
    record = simulate(Schedule(), replace(WORK, costs=costs, needs=Needs(greedy_baseline=True)))
    reasons = {entry.reason for entry in record.entries if entry.event == TerminalEvent.FAILED}
    assert reasons == {"a simulated failure", "its greedy baseline: a simulated failure"}
    counts = [result.metrics.get("failed_baselines/verifier", 0.0) for result in record.results]
    assert sum(counts) >= len({entry.sample.key.gid for entry in record.entries if "baseline" in entry.reason}) > 0


def test_failures_that_are_faster_than_the_first_baselines_do_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lead of generation, more groups than a step has may fail before the first baseline is scored."""
    answer = EnginePool.answer

    async def refuse_later_ones(self: EnginePool, requests: Sequence[Request], **options: Any) -> list[Response]:
        answered = await answer(self, requests, **options)
        return [
            replace(each, failure="it is too long") if each.request.owner.gid in range(1, 9) else each
            for each in answered
        ]

    monkeypatch.setattr(EnginePool, "answer", refuse_later_ones)
    record = simulate(Schedule(max_staleness=4), replace(WORK, needs=Needs(greedy_baseline=True)))
    assert record.results


@pytest.mark.parametrize("part", ["response", "score"])
def test_a_run_whose_greedy_baselines_all_fail_ends_with_the_cause(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    if part == "response":
        answer = EnginePool.answer

        async def refuse(self: EnginePool, requests: Sequence[Request], **options: Any) -> list[Response]:
            return [replace(each, failure="it is too long") for each in await answer(self, requests, **options)]

        monkeypatch.setattr(EnginePool, "answer", refuse)
        cause = "the engine refused the request: it is too long"
    else:
        score = SimulatedReward.score

        async def fail(self: SimulatedReward, samples: Sequence[Sample]) -> list[RewardResult]:
            results = await score(self, samples)
            failed = RewardResult(failure="no verdict")
            return [failed if each.key.index < 0 else found for each, found in zip(samples, results, strict=True)]

        monkeypatch.setattr(SimulatedReward, "score", operation(bin="score", on_device=False)(fail))
        cause = "no verdict"
    with pytest.raises(InterlaceError, match=f"first 4 groups all failed, .* The first failed by {cause}"):
        simulate(Schedule(), replace(WORK, needs=Needs(greedy_baseline=True)))
