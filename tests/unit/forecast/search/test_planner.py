"""Plans stay within bounds, improve if possible, and can always run."""

from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.forecast.profile.types import Lengths, RolloutCosts, TrainCosts, Turns
from interlace.forecast.search import planner
from interlace.forecast.search.bounds import estimate_step, misfit, response_lengths
from interlace.forecast.search.candidates import Candidate, Layout, neighbours, plain
from interlace.forecast.search.feasible import SearchProblem
from interlace.forecast.search.planner import coarser
from interlace.forecast.search.plans import (
    Fidelity,
    PlanLimits,
    Planned,
    Refused,
    SampleEffort,
    Score,
    list_changes,
    pareto,
)
from interlace.schedule.concurrency import WholeEpisodes
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.plan_search import PROFILE, WORKLOAD, InventedScores, devices, score, search


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_candidate_like_any_other(name: str) -> None:
    preset = load_schedule(name)
    on = Candidate.of(preset, name).on(8)
    assert on is not None
    for role in ("rollout", "reference", "critic", "actor"):
        assert on.instances(role, devices(8)) == preset.instances(role, devices(8)), role
    assert on.model_copy(update={"placement": preset.placement}) == preset


@given(
    eighths=st.integers(1, 8), trains=st.integers(1, 8), span=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 40),
    inference=st.sampled_from(["training", "rollout", "apart"]),
)  # fmt: skip
def test_a_layout_fits_every_cluster_or_says_no(eighths, trains, span, count, inference) -> None:
    layout = Layout(rollout=Fraction(eighths, 8), training=Fraction(trains, 8), span=span, inference=inference)
    placement = layout.placement(count)
    if placement is None:
        return
    schedule = Schedule.parse({"placement": placement})
    for role in ("rollout", "reference", "critic", "actor"):
        instances = schedule.instances(role, devices(count))
        assert instances and all(instances)
    if layout.is_split:
        used = {
            d.index
            for role in ("rollout", "actor", "reference")
            for i in schedule.instances(role, devices(count))
            for d in i
        }
        assert used == set(range(count))


def test_neighbours_differ_and_are_valid() -> None:
    for candidate in plain():
        found = [*chain.from_iterable(neighbours(candidate, spans=(1, 2), has_reference=True))]
        assert candidate not in found
        assert len(found) > 40
        agents = chain.from_iterable(neighbours(candidate, spans=(1, 2), has_reference=True, has_tools=True))
        whole = [each for each in agents if each not in found]
        assert [each.rest.concurrency for each in whole] == [WholeEpisodes()]


def test_a_schedule_that_publishes_seldom_does_not_pass_for_on_policy() -> None:
    seldom, limits = load_schedule("verl-fully-async-b"), PlanLimits()
    assert seldom.staleness_bound == 0
    assert limits.refusal(load_schedule("verl-colocated")) is None
    assert limits.refusal(seldom) == "publishes every 4 steps, and 1 is allowed"
    assert PlanLimits(max_sync_every=4).refusal(seldom) is None
    assert limits.refusal(load_schedule("areal")) == "samples may be 4 versions stale, more than the 0 allowed"


def test_the_bound_refuses_what_is_staler() -> None:
    scorer = InventedScores(lambda schedule: score(100.0 + 10 * schedule.staleness_bound))
    on_policy = search(PROFILE, WORKLOAD, devices(8), PlanLimits(), scorer, effort=SampleEffort(40_000))
    assert all(plan.staleness_bound == 0 for plan in on_policy.ranked)
    ahead = search(PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(40_000))
    assert ahead.best.staleness_bound == 4


def test_the_search_climbs_to_what_no_preset_has() -> None:
    def rule(schedule: Schedule) -> Score:
        wide = schedule.instances("rollout", devices(8))[0]
        return score(
            100.0 * len(wide) + 50 * (schedule.dispatch == "longest_first") + 30 * (schedule.concurrency == 64)
        )

    found = search(PROFILE, WORKLOAD, devices(8), PlanLimits(), InventedScores(rule), effort=SampleEffort(200_000))
    assert found.best.score.tokens_per_s == 280.0
    assert found.ratio(found.best) == pytest.approx(2.8)


@pytest.mark.parametrize(("step_noise", "is_tied"), [(0.0, False), (0.02, False), (0.2, True)])
def test_plans_within_the_noise_are_tied(step_noise: float, is_tied: bool) -> None:
    def rule(schedule: Schedule) -> Score:
        return score(1000 + 50 * (schedule.staleness_bound > 0))

    profile = PROFILE.model_copy(update={"step_noise": step_noise})
    limits = PlanLimits(max_staleness=4)
    found = search(profile, WORKLOAD, devices(8, 1000), limits, InventedScores(rule), effort=SampleEffort(200_000))
    assert found.best.staleness_bound > 0
    assert (found.least_stale.staleness_bound == 0) == is_tied
    assert found.best in found.tied
    slowest = min(plan.score.tokens_per_s for plan in found.tied)
    assert slowest == (1000 if is_tied else 1050)


def test_biased_plans_are_out_of_bounds_where_the_user_says_so() -> None:
    def rule(schedule: Schedule) -> Score:
        short = schedule.tail.kind in ("oversample", "tail_batching")
        return score(300.0, shift=-0.2) if short else score(100.0)

    free = search(PROFILE, WORKLOAD, devices(8), PlanLimits(), InventedScores(rule), effort=SampleEffort(60_000))
    fair = search(
        PROFILE,
        WORKLOAD,
        devices(8),
        PlanLimits(max_length_shift=0.05),
        InventedScores(rule),
        effort=SampleEffort(60_000),
    )
    assert free.best.score.length_shift == -0.2
    assert fair.best.score.length_shift == 0.0
    assert {plan.score.length_shift for plan in free.front} == {-0.2, 0.0}
    assert free.unbiased is not None
    assert free.unbiased.score == score(100.0)


def test_no_schedule_is_simulated_twice() -> None:
    scorer = InventedScores(lambda schedule: score(100.0 + len(str(schedule)) % 11))
    search(PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(100_000))
    assert len(scorer.asked) == len(set(scorer.asked))


def test_each_preset_is_given_its_reason() -> None:
    def rule(schedule: Schedule) -> Score | Refused:
        if schedule.dispatch == "skew_aware":
            return Refused(reason="a test refuses it")
        return score(100.0 + 5 * (schedule.dispatch == "least_tokens"))

    found = search(PROFILE, WORKLOAD, devices(8), PlanLimits(), InventedScores(rule), effort=SampleEffort(40_000))
    reasons = {why.preset: why for why in found.why_not}
    assert reasons["streamrl-sync"].reason == "a test refuses it"
    assert reasons["verl-colocated"].ratio == pytest.approx(100 / 105)
    assert "4 versions" in reasons["areal"].reason
    assert reasons["verl-colocated"].loses == [("train", 0.5 * 105 / 100 - 0.5)] or reasons["verl-colocated"].loses


def test_no_memory_says_which_part_and_by_how_much() -> None:
    large = PROFILE.model_copy(update={"actor": TrainCosts(token_s=1e-4, state_bytes=9000)})
    with pytest.raises(
        UserError,
        match=r"no plan fits into memory.*actor on 8 devices needs .* Its largest part is state",
    ):
        search(
            large, WORKLOAD, devices(8), PlanLimits(), InventedScores(lambda _: score(1.0)), effort=SampleEffort(1000)
        )
    found = misfit(Schedule(), large, WORKLOAD, devices(8))
    assert found is not None
    assert (found.memory.role, found.needed_bytes, found.memory.device_bytes) == ("actor", 1125, 100)


def test_a_missed_deadline_is_refused_with_the_best_plan_found() -> None:
    expected = (
        r"1000 steps take 2.778 h with the best plan found, 10 s per step instead of 1: {.*}. Set plan.deadline_h="
    )
    with pytest.raises(UserError, match=expected):
        search(
            PROFILE,
            WORKLOAD,
            devices(8),
            PlanLimits(deadline_s=1000.0, num_steps=1000),
            InventedScores(lambda _: score(100.0)),
            effort=SampleEffort(20_000),
        )


def test_the_same_arguments_give_the_same_plan() -> None:
    rule = lambda schedule: score(100.0 + len(str(schedule)) % 7)  # noqa: E731
    first, second = (
        search(
            PROFILE,
            WORKLOAD,
            devices(8),
            PlanLimits(max_staleness=2),
            InventedScores(rule),
            effort=SampleEffort(50_000),
        )
        for _ in "ab"
    )
    assert first == second


def test_more_fidelity_is_spent_on_fewer() -> None:
    scorer = InventedScores(lambda schedule: score(100.0 + len(str(schedule)) % 11))
    large = replace(WORKLOAD, num_devices=256, prompts_per_step=256, samples_per_prompt=16)
    assert coarser(large)[:2] == (32, 8)
    search(PROFILE, large, devices(256), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(600_000))
    asked = {scale: sum(each.scale == scale for _, each in scorer.asked) for scale in (32, 8, 1)}
    assert asked[32] > asked[8] > asked[1] > 0


def test_the_front_holds_what_no_other_plan_beats() -> None:
    def plan(tokens: float, lag: int, shift: float) -> Planned:
        return Planned(
            name="", schedule=Schedule(), score=score(tokens, shift=shift), staleness_bound=lag, candidate=plain()[0]
        )

    front = pareto([plan(3, 4, 0), plan(2, 4, 0), plan(2, 0, -0.1), plan(1, 0, 0), plan(1, 1, -0.05)])
    assert [(each.score.tokens_per_s, each.staleness_bound) for each in front] == [(3, 4), (2, 0), (1, 0)]


def test_a_lower_bound_is_below_what_a_long_response_takes() -> None:
    alone = estimate_step(Schedule(), PROFILE, WORKLOAD, devices(8)).least_s
    assert alone > 0
    ahead = Schedule.parse({"max_staleness": 4, "batching": "arrival"})
    assert estimate_step(ahead, PROFILE, WORKLOAD, devices(8)).least_s <= alone


def test_turns_of_an_episode_count_in_the_order_of_candidates() -> None:
    """Estimates with one response per sample preferred fewer engines, although agents generate eight times as much."""
    lengths = Lengths(median=100, prompt_sigma=0.0, response_sigma=0.0)
    turns = Turns(turns=(8.0,), given_tokens=(10.0,), tool_s=(1.0,))
    rollout = RolloutCosts(steps=((1, 0.05), (4, 0.05), (64, 0.2)), kv_tokens=100_000)
    actor = PROFILE.actor.model_copy(update={"token_s": 1e-3})
    agents = PROFILE.model_copy(update={"lengths": lengths, "turns": turns, "rollout": rollout, "actor": actor})

    def estimate(share: int, num_turns: float, **fields: object) -> float:
        placement = {"rollout": f"0-{share}%", "actor": f"{share}-100%"}
        schedule = Schedule.parse({"placement": placement, **fields})
        return estimate_step(schedule, agents, replace(WORKLOAD, turns=num_turns), devices(8)).likely_s

    ahead = {"max_staleness": 2, "batching": "arrival", "on_update": "keep"}
    assert min((25, 50, 75), key=lambda share: estimate(share, 1.0, **ahead)) == 50
    assert min((25, 50, 75), key=lambda share: estimate(share, 8.0, **ahead)) == 75
    assert estimate(75, 8.0) - estimate(75, 8.0, **ahead) > 7.0, (
        "a synchronous step also waits for the seven tools of an episode"
    )


def test_a_cost_per_token_that_was_measured_as_0_gives_a_lower_bound() -> None:
    rollout = PROFILE.rollout.model_copy(update={"steps": ((1, 0.0), (64, 0.0))})
    free = PROFILE.model_copy(update={"actor": TrainCosts(token_s=0.0, call_s=0.1, state_bytes=60), "rollout": rollout})
    assert (
        0.0
        == estimate_step(Schedule(), free, WORKLOAD, devices(8)).least_s
        < estimate_step(Schedule(), PROFILE, WORKLOAD, devices(8)).least_s
    )


def test_a_schedules_file_holds_what_differs_and_loads_again() -> None:
    for name in preset_names():
        schedule = load_schedule(name)
        assert Schedule.parse(list_changes(schedule)) == schedule


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 64), st.integers(1, 64))
def test_scales_divide_devices_and_prompts(num_devices: int, prompts: int) -> None:
    coarse, middle, *_ = coarser(replace(WORKLOAD, num_devices=num_devices, prompts_per_step=prompts))
    for scale in (coarse, middle):
        assert num_devices % scale == 0 == prompts % scale
    assert Fidelity(scale=coarse, steps=4).num_steps(Schedule()) == 4


def test_a_search_returns_the_best_so_far_when_its_time_is_over() -> None:
    asked = []

    def scorer(tasks):
        asked.extend(tasks)
        return [score(100.0 + lag(schedule)) if len(asked) <= 16 else None for schedule, _ in tasks]

    def lag(schedule: Schedule) -> float:
        return schedule.max_staleness

    found = search(PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(100))
    assert found.ranked and found.num_scored <= 16
    assert any("the time was over" in each.reason for each in found.why_not)


def test_a_search_in_which_nothing_is_trained_is_refused() -> None:
    """All groups are filtered if no response is right, and the speed of every schedule is 0."""
    found = replace(score(1.0), tokens_per_s=0.0)
    with pytest.raises(UserError, match=r"no schedule trained a token .* 50% of the responses are right"):
        search(
            PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), InventedScores(lambda _: found),
            effort=SampleEffort(3_000),
        )  # fmt: skip


def test_a_preset_that_trains_nothing_has_no_ratio() -> None:
    scorer = InventedScores(
        lambda schedule: score(1.0) if schedule.max_staleness else replace(score(1.0), tokens_per_s=0.0)
    )
    found = search(PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(3_000))
    assert found.ranked[0].score.tokens_per_s == 1.0 and found.ratio(found.ranked[0]) is None
    assert any("no token was trained" in each.reason for each in found.why_not)


def test_a_search_without_one_finished_simulation_names_the_most_promising_plan() -> None:
    """Presets that `accepts` refuses must not become the reason: the time ended, not the choice of schedules."""

    def accepts(schedule: Schedule) -> str | None:
        return "a test refuses it" if schedule.dispatch == "skew_aware" else None

    problem = SearchProblem(profile=PROFILE, workload=WORKLOAD, devices=devices(8), accepts=accepts)
    with pytest.raises(UserError, match=r"ended before .* The most promising one takes at least .* s per step: {.*}"):
        planner.search(problem, lambda tasks: [None] * len(tasks), effort=SampleEffort(100))


def test_a_length_shift_that_no_plan_keeps_is_refused_with_the_closest_one() -> None:
    rule = lambda schedule: score(100.0, shift=-0.3 if schedule.dispatch == "round_robin" else -0.2)  # noqa: E731
    with pytest.raises(UserError, match=r"plan.max_length_shift=0.05: .*shortens them by 20.0%.*Raise"):
        search(
            PROFILE, WORKLOAD, devices(8), PlanLimits(max_length_shift=0.05), InventedScores(rule),
            effort=SampleEffort(20_000),
        )  # fmt: skip


def test_the_most_frequent_reason_is_given_if_no_schedule_is_accepted() -> None:
    problem = SearchProblem(
        profile=PROFILE, workload=WORKLOAD, devices=devices(8), accepts=lambda schedule: "a test refuses all"
    )
    with pytest.raises(UserError, match=r"most frequent reason, of [0-9]+ schedules: a test refuses all"):
        planner.search(problem, InventedScores(lambda _: score(1.0)), effort=SampleEffort(1000))


def test_checks_end_with_half_of_the_effort_before_the_first_simulation() -> None:
    """On thousands of devices each check takes milliseconds, and all of them took longer than the search's limit."""
    checked: list[Schedule] = []
    checked_before: list[int] = []

    class Used(SampleEffort):
        """Effort that checks use up as well."""

        @property
        def share_left(self) -> float:
            return 1.0 if len(checked) < 3 else 0.4

    def accepts(schedule: Schedule) -> None:
        checked.append(schedule)

    def scorer(tasks):
        checked_before.append(len(checked))
        return [score(1.0) for _ in tasks]

    problem = SearchProblem(profile=PROFILE, workload=WORKLOAD, devices=devices(8), accepts=accepts)
    planner.search(problem, scorer, effort=Used(1000))
    assert checked_before[0] == 3


@pytest.mark.parametrize("cap_share", [0.0, 0.3, 0.6, 1.0])
def test_bounds_have_the_share_of_responses_that_reach_the_limit(cap_share: float) -> None:
    lengths = response_lengths(Lengths(median=100, cap_share=cap_share), 100_000)
    assert sum(length == 100_000 for length in lengths) / len(lengths) == pytest.approx(cap_share)
    assert list(lengths) == sorted(lengths)
