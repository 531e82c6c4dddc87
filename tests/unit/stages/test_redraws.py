"""Samples that fail by infrastructure are drawn again, and an outage pauses admission."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from interlace.core.errors import EpisodeLostError
from interlace.core.recovery import Breaker, Cause, RecoveryConfig, RestartBudget
from interlace.core.types import RETRY, Prompt, RewardResult, Sample, TerminalEvent
from interlace.rollouts.base import Session
from interlace.rollouts.session import EpisodeSession
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.sim.cluster import RankWrapper, SimCluster
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Record, Workload, check, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=3, num_steps=6)


@dataclass
class FailingReward:
    """Rank of the reward role whose results fail on some calls."""

    rank: Rank
    calls: range
    cause: Cause
    num_calls: int = 0

    async def call(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> RankResult:
        ran = await self.rank.call(method, args, kwargs)
        if method != "score":
            return ran
        samples: Sequence[Sample] = args[0] if args else kwargs["samples"]  # type: ignore[assignment]
        results: list[RewardResult] = []
        for _, result in zip(samples, ran.value, strict=True):
            fails = self.num_calls in self.calls
            self.num_calls += 1
            results.append(RewardResult(failure="out of order", cause=self.cause) if fails else result)
        return ran._replace(value=results)

    def call_now(self, method: str, args: tuple[object, ...]) -> None:
        self.rank.call_now(method, args)

    async def close(self) -> None:
        await self.rank.close()


def around(calls: range, cause: Cause) -> RankWrapper:
    def wrap(rank: Rank, context: WorkerContext) -> Rank:
        return FailingReward(rank, calls, cause) if context.group == "reward" else rank

    return wrap


def run_with_failures(
    calls: range,
    cause: Cause,
    *,
    schedule: Schedule | None = None,
    recovery: RecoveryConfig | None = None,
    work: Workload = WORK,
) -> Record:
    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=around(calls, cause))

    work = replace(work, recovery=recovery or RecoveryConfig())
    return simulate(schedule or Schedule(), work, make_cluster=cluster)


def test_a_sample_that_failed_by_infrastructure_is_drawn_again_so_that_its_group_is_whole() -> None:
    record = run_with_failures(range(5, 9), Cause.NETWORK)
    check(record, WORK, 0)
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 3}
    assert sum(result.metrics.get("redrawn/network", 0) for result in record.results) == 4
    attempts = Counter(entry.sample.prompt.attempt for entry in record.entries)
    assert attempts[RETRY] == 4, "a retry has other noise than the next epoch"


@pytest.mark.parametrize("cause", [Cause.POLICY, Cause.USER])
def test_a_sample_that_failed_by_the_policy_or_the_users_code_is_not_drawn_again(cause: Cause) -> None:
    record = run_with_failures(range(5, 9), cause)
    assert record.events[TerminalEvent.FAILED] == 4
    shares = [result.metrics.get(f"failed/{cause}", 0) * len(result.ended) for result in record.results]
    assert sum(shares) == pytest.approx(4)
    assert not any("redrawn" in name for result in record.results for name in result.metrics)


def test_attempts_at_a_sample_are_bounded() -> None:
    record = run_with_failures(range(5, 9), Cause.VERIFIER, recovery=RecoveryConfig(redraws=0))
    assert record.events[TerminalEvent.FAILED] == 4


def test_an_outage_pauses_admission_and_costs_no_prompt() -> None:
    recovery = RecoveryConfig(failures_in_a_row=4, probe_s=1.0)
    record = run_with_failures(range(14, 40), Cause.SANDBOX, recovery=recovery)
    check(record, WORK, 0)
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 3}
    assert record.seconds > run_with_failures(range(0), Cause.SANDBOX).seconds + 1


def test_an_outage_without_an_end_ends_the_run_with_its_cause() -> None:
    recovery = RecoveryConfig(failures_in_a_row=4, outage_s=100)
    with pytest.raises(Exception, match=r"recovery.outage_s.*sandbox"):
        run_with_failures(range(14, 10**9), Cause.SANDBOX, recovery=recovery)


def test_a_pause_ends_although_the_samples_that_could_end_it_are_suspended() -> None:
    """The wait for the next probe is no progress, so the stall of the other samples is resolved."""
    schedule = Schedule.parse(
        {"max_staleness": 2, "batching": "arrival", "publish": "background", "rollout_budget": 10}
    )
    work = replace(WORK, costs=Costs(max_tokens=800))
    recovery = RecoveryConfig(failures_in_a_row=4, probe_s=1.0, redraws=0)
    record = run_with_failures(range(37, 45), Cause.SANDBOX, schedule=schedule, recovery=recovery, work=work)
    assert len(record.results) == work.num_steps


class LosesTheLast:
    """Episode that loses its simulator in one sample of each group of the last step, after the other samples."""

    async def run(self, prompt: Prompt, session: Session) -> float:
        turn = await session.generate(prompt.token_ids.tolist())
        assert isinstance(session, EpisodeSession)
        if session.key.gid >= 4 * 5 and not session.key.index:
            async with session.waiting("a simulator"):
                await asyncio.sleep(1000)
            raise EpisodeLostError("its simulator is gone")
        return float(len(turn.token_ids))


@pytest.mark.parametrize(
    ("schedule", "evaluation_s"),
    [({}, 500), pytest.param({"max_staleness": 1, "publish": "background"}, 5000, id="groups wait for the trainer")],
)
def test_a_pause_at_the_end_of_a_run_does_not_end_it_while_no_attempt_is_possible(
    schedule: dict[str, object], evaluation_s: float
) -> None:
    recovery = RecoveryConfig(failures_in_a_row=4, probe_s=1.0, outage_s=100)
    work = replace(WORK, recovery=recovery, episode=LosesTheLast(), refill_rounds=0)
    record = simulate(Schedule.parse(schedule), work, between=lambda _run: asyncio.sleep(evaluation_s))
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 3 - 4, TerminalEvent.FAILED: 4}


def test_an_outage_under_a_stale_schedule_keeps_the_bound() -> None:
    schedule = Schedule.parse({"max_staleness": 2, "batching": "arrival", "publish": "background"})
    recovery = RecoveryConfig(failures_in_a_row=4, probe_s=1.0)
    record = run_with_failures(range(14, 40), Cause.SANDBOX, schedule=schedule, recovery=recovery)
    check(record, WORK, 2)


def test_failures_before_the_first_success_do_not_open_the_breaker() -> None:
    breaker = Breaker(2)
    assert not any(breaker.failed(Cause.TOOL) for _ in range(9))
    breaker.succeeded()
    assert [breaker.failed(Cause.TOOL) for _ in range(2)] == [False, True]
    assert breaker.open_for == Cause.TOOL
    assert breaker.succeeded() and breaker.open_for is None


def test_failures_of_other_causes_do_not_add_up() -> None:
    breaker = Breaker(2)
    breaker.succeeded()
    assert not any(breaker.failed(cause) for cause in (Cause.TOOL, Cause.SANDBOX, Cause.NETWORK))


def test_a_budget_counts_the_restarts_of_the_last_hour() -> None:
    budget = RestartBudget("reward", 2)
    assert [budget.spend(now_s) for now_s in (0.0, 10.0)] == ["", ""]
    assert "recovery.restarts_per_hour.reward is 2" in budget.spend(20.0)
    assert not budget.spend(3700.0)
    assert not any(RestartBudget("env", None).spend(0.0) for _ in range(99))
