"""The policy flow keeps its promises for every step, on the virtual clock."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from interlace.algorithms.base import Advantages, Needs, advantages_of
from interlace.core.errors import InterlaceError, UserError
from interlace.core.recovery import Cause, SampleFailure
from interlace.core.types import (
    NO_GROUP,
    Prompt,
    Request,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.flows.failed_samples import FailedSamples
from interlace.forecast.costs.workers import zeros
from interlace.forecast.virtual import SimulatedRole
from interlace.rewards.shaping import OVERLONG, TASK, ShapingConfig
from interlace.rollouts.base import Session
from interlace.runtime.timeline import KeepAll
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import CostAlgorithm, Costs
from tests.support.sim_run import Record, Workload, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=3, num_steps=5)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_trains_every_step_within_its_bound(name: str) -> None:
    schedule = load_schedule(name)
    record = simulate(schedule, WORK)
    assert [len(step) for step in record.trained] == [4] * 5
    assert max(record.staleness) <= schedule.staleness_bound


def test_filtered_groups_are_replaced_until_the_batch_is_full() -> None:
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=0.5)))
    assert [len(step) for step in record.trained] == [4] * 5
    assert record.events[TerminalEvent.FILTERED] > 0
    counted = sum(result.metrics["samples/filtered"] for result in record.results)
    assert counted == sum(e.event == TerminalEvent.FILTERED for result in record.results for e in result.ended)


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_batch_stays_short_once_its_refills_are_used_up(rounds: int) -> None:
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=0.7), refill_rounds=rounds))
    assert len(record.results) == 5, "a short batch is still a step"
    assert min(len(step) for step in record.trained) < 4
    launched = sum(record.events.values()) / WORK.samples_per_prompt
    assert launched <= 4 * 5 * (1 + rounds)


@pytest.mark.parametrize("statistics", [False, True])
def test_a_batch_that_lost_all_its_groups_is_a_step_without_an_update(statistics: bool) -> None:
    needs = Needs(batch_statistics=statistics)
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=1.0), refill_rounds=1, needs=needs))
    assert [len(step) for step in record.trained] == [0] * 5
    assert [result.version for result in record.results] == [1, 2, 3, 4, 5]


def test_a_first_step_of_samples_that_all_fail_ends_the_run_before_others_take_their_places() -> None:
    work = replace(WORK, costs=Costs(fail_share=1.0), refill_rounds=10)
    with pytest.raises(InterlaceError, match="the first 12 samples, a whole step, all failed, so there is nothing"):
        simulate(Schedule(), work)


def test_a_reason_that_ends_with_a_full_stop_is_not_given_a_second_one() -> None:
    class Ended:
        def fail(self, error: BaseException) -> None:
            raise error

    failed = FailedSamples(Ended(), samples_per_step=1)  # type: ignore[arg-type]  # only its end is used
    failure = SampleFailure(reason="UserError: end the episode sooner.", cause=Cause.USER)
    with pytest.raises(InterlaceError, match=r"sooner\.$") as raised:
        failed.count(SampleKey(0, 0), failure, num_scored=0)
    assert not str(raised.value).endswith("..")


class EpisodesWithRewards(Costs):
    """Costs of a run without a reward role."""

    def roles(self) -> Mapping[str, SimulatedRole]:
        return {role: worker for role, worker in super().roles().items() if role != "reward"}


class Measured:
    """An episode whose reward is the length of its response; every fourth has none."""

    def __init__(self) -> None:
        self.num_runs = 0

    async def run(self, prompt: Prompt, session: Session) -> float | None:
        self.num_runs += 1
        number = self.num_runs
        turn = await session.generate(prompt.token_ids.tolist())
        return float(len(turn.token_ids)) if number % 4 else None


def test_without_a_reward_role_an_episodes_own_reward_is_trained_on() -> None:
    work = replace(WORK, samples_per_prompt=4, costs=EpisodesWithRewards(), episode=Measured())
    record = simulate(Schedule(), work)
    assert [len(step) for step in record.trained] == [4] * 5
    for entry in record.entries:
        if entry.event == TerminalEvent.FAILED:
            assert entry.reason == "its episode brought no reward, and the recipe has none"
        else:
            assert entry.sample.reward == entry.sample.num_sampled
    assert record.events[TerminalEvent.FAILED] == 4 * 5
    assert all(result.metrics["timing_s/reward"] == 0.0 for result in record.results)


def test_a_greedy_baseline_needs_a_reward_role() -> None:
    with pytest.raises(ValueError, match="scored by the reward role; here are SingleTurn and no reward role"):
        simulate(Schedule(), replace(WORK, costs=EpisodesWithRewards(), needs=Needs(greedy_baseline=True)))


def test_failed_samples_leave_their_group_while_two_remain() -> None:
    record = simulate(Schedule(), replace(WORK, samples_per_prompt=4, costs=Costs(fail_share=0.3)))
    assert record.events[TerminalEvent.FAILED] > 0
    assert record.events[TerminalEvent.TRAINED] < 4 * 4 * 5
    assert [len(step) for step in record.trained] == [4] * 5


def test_the_end_of_the_data_ends_the_run_with_a_short_batch() -> None:
    record = simulate(Schedule(), replace(WORK, num_prompts=10))
    assert [len(step) for step in record.trained] == [4, 4, 2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "returned a NoneType, not Advantages"),
        (Advantages(advantages=[]), r"advantages of shapes \[\] for 3 samples"),
        (Advantages(advantages=[np.zeros(1), 0.5]), "'float'"),  # type: ignore[list-item]  # on purpose
        (Advantages(advantages=3), "of shapes int"),  # type: ignore[arg-type]
    ],
)
def test_advantages_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: Advantages | None, sentence: str
) -> None:
    monkeypatch.setattr(CostAlgorithm, "advantages", lambda _self, _group: given)
    with pytest.raises(UserError, match=sentence):
        simulate(Schedule(), WORK)


def test_a_critic_without_returns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostAlgorithm, "advantages", lambda _self, group: Advantages(advantages=zeros(group.samples)))
    with pytest.raises(UserError, match="no returns, which its critic is trained towards"):
        simulate(Schedule(), replace(WORK, needs=Needs(critic=True)))


def test_a_batch_s_advantages_are_looked_at_as_a_group_s_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostAlgorithm, "batch_advantages", lambda _self, samples: advantages_of(samples)[:-1])
    with pytest.raises(UserError, match=r"batch_advantages\(\) returned advantages of shapes .* for 12 samples"):
        simulate(Schedule(), replace(WORK, needs=Needs(batch_statistics=True)))


def test_a_stop_leaves_nothing_half_done() -> None:
    record = simulate(Schedule(max_staleness=2, batching="arrival", on_update="keep"), WORK, stop_after=2)
    assert len(record.results) == 2
    assert record.events[TerminalEvent.TRAINED] == 2 * 4 * 3
    assert sum(record.events.values()) == len(record.ended)


def test_a_split_pipeline_takes_less_time_than_turns() -> None:
    work = replace(WORK, num_steps=10, costs=Costs(train_token=2e-3))
    turns = simulate(load_schedule("verl-colocated"), work)
    pipeline = simulate(load_schedule("one-step-off"), work)
    assert pipeline.seconds < 0.9 * turns.seconds


LONG_TAILED = replace(WORK, prompts_per_step=8, num_steps=8, costs=Costs(median_tokens=20, max_tokens=400))


def lengths(record: Record) -> float:
    trained = [e.sample.num_tokens for r in record.results for e in r.ended if e.event == TerminalEvent.TRAINED]
    return sum(trained) / len(trained)


def test_oversampling_takes_what_finishes_first_and_the_rest_is_surplus() -> None:
    plain = simulate(Schedule(), LONG_TAILED)
    eager = simulate(Schedule.parse({"tail": {"kind": "oversample", "prompts": 2, "responses": 2}}), LONG_TAILED)
    assert eager.seconds < plain.seconds
    assert eager.events[TerminalEvent.SURPLUS] > 0
    assert [len(step) for step in eager.trained] == [8] * 8
    assert lengths(eager) < lengths(plain), "the price: short samples are favoured"


def test_a_round_launches_as_many_as_its_factor_says() -> None:
    """100 x 1.1 is 110.00000000000001 to a computer."""
    work = replace(WORK, prompts_per_step=100, samples_per_prompt=2, num_steps=1)
    record = simulate(Schedule.parse({"tail": {"kind": "oversample", "prompts": 1.1}}), work)
    assert record.num_opened == 110 * 2


def test_tail_batching_trains_the_prompts_that_were_too_slow_later() -> None:
    tail = {"kind": "tail_batching", "prompts": 1.5, "responses": 2, "max_age": 4}
    record = simulate(Schedule.parse({"tail": tail}), replace(LONG_TAILED, num_steps=24))
    needed = LONG_TAILED.prompts_per_step * LONG_TAILED.samples_per_prompt
    launched = {len(result.ended) for result in record.results}
    assert launched == {3 * needed, needed}, "nothing more is launched in a round of long ones"
    trained = {uid for step in record.trained for uid in step}
    seen = {entry.sample.prompt.uid for result in record.results[:16] for entry in result.ended}
    assert seen <= trained, "none of the first rounds' prompts starved"


SHARED: dict[str, object] = {"granularity": {"reference": 4}}
APART: dict[str, object] = {
    "placement": {"rollout": "0-50%", **dict.fromkeys(("reference", "critic", "actor"), "50-100%")}
}


@pytest.mark.parametrize(
    ("fields", "kv_tokens", "is_gathered"),
    [
        (SHARED, 10**9, True),
        (APART, 10**9, True),
        ({}, 10**9, False),  # nobody has a use for the others' devices before all is generated
        (SHARED, 1000, False),  # decoding all of it on one engine would be slow
    ],
)
def test_survivors_are_gathered_where_that_frees_devices_that_somebody_waits_for(
    fields: dict[str, object], kv_tokens: int, *, is_gathered: bool
) -> None:
    tail = {"kind": "migrate", "remaining_share": 0.3, "batch": 48}
    schedule = Schedule.parse({"tail": tail, "dispatch": "least_tokens", **fields})
    recorder = KeepAll()
    costs = replace(LONG_TAILED.costs, kv_tokens=kv_tokens)
    simulate(schedule, replace(LONG_TAILED, num_steps=1, costs=costs), recorder=recorder)
    assert any(span.operation == "abort" for span in recorder.spans) == is_gathered
    spans = [span for span in recorder.spans if span.operation == "serve"]
    end = max(span.end_s for span in spans)
    engines = {span.group for span in spans if span.end_s > 0.9 * end}
    assert not is_gathered or len(engines) == 1


def test_an_evaluation_after_a_gathered_tail_has_all_engines() -> None:
    schedule = Schedule.parse({"tail": {"kind": "migrate", "remaining_share": 0.3}, **APART})
    recorder = KeepAll()
    asked = [
        Request(uid=f"e{n}", owner=SampleKey(NO_GROUP, 0), prompt_ids=[0], params=SamplingParams()) for n in range(8)
    ]
    work = replace(LONG_TAILED, num_steps=1)
    simulate(schedule, work, recorder=recorder, between=lambda run: run.outside.complete(asked))
    aborted = [span for span in recorder.spans if span.operation == "abort"]
    assert aborted, "the tail was gathered"
    trained = next(span for span in recorder.spans if span.operation == "optimizer_step")
    assert len({s.group for s in recorder.spans if s.operation == "serve" and s.start_s > trained.end_s}) == 2


def test_with_one_minibatch_proximal_log_probs_wait_for_no_more_than_their_granule() -> None:
    """The weights are those of the start of the step until its one update."""
    schedule = Schedule.parse({**APART, "granularity": "group"})
    recorder = KeepAll()
    work = replace(LONG_TAILED, num_steps=1, needs=Needs(proximal_logprobs=True))
    simulate(schedule, work, recorder=recorder)
    wanted = ("logprobs", "accumulate", "optimizer_step")
    actor = [span.operation for span in recorder.spans if span.role == "actor" and span.operation in wanted]
    assert actor[:4] == ["logprobs", "accumulate", "logprobs", "accumulate"] and actor.count("optimizer_step") == 1
    generated = max(span.end_s for span in recorder.spans if span.operation == "serve")
    assert min(span.start_s for span in recorder.spans if span.operation == "accumulate") < generated


@pytest.mark.parametrize("seed", range(5))
def test_minibatches_of_a_granule_s_size_or_less_are_summed_in_one_piece(seed: int) -> None:
    """So their weights are those of any other synchronous schedule, to the bit."""
    recorder = KeepAll()
    placement = {"rollout": "0-1", "reference": "2-3", "critic": "2-3", "actor": "2-3"}
    granularity = {"reference": "sample", "critic": "sample", "actor": 12}
    work = replace(WORK, prompts_per_step=16, minibatches=[4, 8][seed % 2], costs=Costs(max_tokens=200 + seed))
    simulate(Schedule.parse({"placement": placement, "granularity": granularity}), work, recorder=recorder)
    found = [span.operation for span in recorder.spans if span.operation in ("accumulate", "optimizer_step")]
    assert found == ["accumulate", "optimizer_step"] * work.minibatches * work.num_steps


def test_later_epochs_take_the_same_groups_in_another_order_whatever_the_schedule() -> None:
    work = replace(WORK, prompts_per_step=8, minibatches=4, epochs=3, num_steps=2)
    found = simulate(Schedule(), work).minibatches
    assert found == simulate(Schedule.parse({"placement": {"rollout": "0-1", "actor": "2-3"}}), work).minibatches
    steps = [found[:12], found[12:]]
    for first, passes in enumerate(steps):
        epochs = [[gid for minibatch in passes[at : at + 4] for gid in minibatch] for at in (0, 4, 8)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(8 * first, 8 * first + 8))] * 3
        assert epochs[0] != epochs[1] != epochs[2]


def test_staleness_counts_from_a_sample_s_oldest_token() -> None:
    placement = {"actor": 0, "rollout": "1-3"}
    fields = {"max_staleness": 3, "batching": "arrival", "on_update": "keep", "placement": placement}
    record = simulate(Schedule.parse(fields), LONG_TAILED)
    trained = [
        [set(e.sample.versions) for e in result.ended if e.event == TerminalEvent.TRAINED] for result in record.results
    ]
    # A step is a version here: the first is taken at version 0.
    counted = [[step - min(one) for one in versions] for step, versions in enumerate(trained)]
    assert record.staleness == [max(each) for each in counted]
    means = [result.metrics["sched/staleness_mean"] for result in record.results]
    assert means == pytest.approx([sum(each) / len(each) for each in counted])
    assert any(len(one) > 1 for versions in trained for one in versions)


def test_a_budget_splits_a_long_response_over_versions() -> None:
    fields = {"max_staleness": 3, "pipeline_depth": 1, "batching": "arrival", "on_update": "abort_resume"}
    schedule = Schedule.parse({**fields, "rollout_budget": 30})
    record = simulate(schedule, LONG_TAILED)
    spans = [e.sample.versions for r in record.results for e in r.ended if e.event == TerminalEvent.TRAINED]
    assert any(len(versions.values) > 1 for versions in spans)
    assert max(record.staleness) <= 3


def test_what_the_trainer_waits_for_goes_on_at_once_when_its_budget_is_used_up() -> None:
    record = simulate(Schedule(rollout_budget=10), WORK)
    assert [len(step) for step in record.trained] == [4] * 5
    assert record.num_stalls == 0, "it waited until nothing else could go on"


@pytest.mark.parametrize(("kv_tokens", "grows"), [(10**6, True), (50, False)])
def test_an_adaptive_limit_follows_what_the_engines_say_of_their_caches(kv_tokens: int, grows: bool) -> None:
    schedule = Schedule.parse({"concurrency": {"kind": "adaptive", "initial": 3}, "placement": {"rollout": 0}})
    work = replace(LONG_TAILED, costs=replace(LONG_TAILED.costs, kv_tokens=kv_tokens))
    limits = [result.metrics["rollout/concurrency"] for result in simulate(schedule, work).results]
    assert (max(limits) > 3) == grows and (min(limits) < 3) != grows


@pytest.mark.parametrize(("policy", "event"), [("drop", TerminalEvent.STALE), ("requeue", TerminalEvent.STALE)])
def test_stragglers_are_dropped_or_started_again_where_the_schedule_says(policy: str, event: TerminalEvent) -> None:
    fields = {
        "max_staleness": 1,
        "batching": "arrival",
        "on_update": "keep",
        "placement": {"actor": 0, "rollout": "1-3"},
    }
    slow = replace(LONG_TAILED, costs=replace(LONG_TAILED.costs, train_token=1e-5, optimizer=0.0, sync=0.0))
    held = simulate(Schedule.parse(fields), slow)
    other = simulate(Schedule.parse({**fields, "on_straggler": policy}), slow)
    assert held.events[event] == 0 and other.events[event] > 0
    assert [len(step) for step in other.trained] == [8] * 8
    assert max(other.staleness) <= 1


@pytest.mark.parametrize("kind", ["oversample", "tail_batching"])
def test_rounds_need_a_synchronous_schedule(kind: str) -> None:
    with pytest.raises(UserError, match="max_staleness 0"):
        Schedule.parse({"tail": kind, "max_staleness": 1})


class TwoTurns:
    """An episode that rewards itself."""

    async def run(self, prompt: Prompt, session: Session) -> float:
        turn = await session.generate(prompt.token_ids.tolist())
        await session.generate([*prompt.token_ids.tolist(), *turn.token_ids.tolist(), 1])
        return 2.0


def test_the_shaping_of_the_recipe_adds_to_rewards_of_episodes() -> None:
    record = simulate(Schedule(), replace(WORK, episode=TwoTurns(), shaping=ShapingConfig(overlong_limit=1)))
    trained = [entry.sample for entry in record.entries if entry.event == TerminalEvent.TRAINED]
    assert trained and all(sample.num_sampled > 1 for sample in trained)
    assert {sample.reward for sample in trained} == {1.0}
    assert trained[0].reward_parts == {TASK: 2.0, OVERLONG: -1.0}
