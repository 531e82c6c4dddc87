"""Order of a search: short searches return the best plan that their effort allows."""

from dataclasses import replace

from interlace.forecast.search import planner
from interlace.forecast.search.bounds import estimate_step
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.feasible import SearchProblem
from interlace.forecast.search.plans import PlanLimits, SampleEffort
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from tests.support.plan_search import PROFILE, WORKLOAD, InventedScores, devices, score, search


def test_a_short_search_predicts_the_current_schedule() -> None:
    """A change compares the two, and an earlier prediction of the current schedule is of other lengths."""
    current = load_schedule("pipelinerl")
    limits = PlanLimits(max_staleness=4)
    problem = SearchProblem(profile=PROFILE, workload=WORKLOAD, devices=devices(8), limits=limits)
    scorer = InventedScores(lambda _: score(1.0))
    found = planner.search(problem, scorer, effort=SampleEffort(3_000), current=current)
    assert found.current is not None and found.current.schedule.dispatch == current.dispatch


def test_a_short_search_begins_from_earlier_plans() -> None:
    """A search after a loss of devices had too little time to find the earlier plan for the remaining devices."""
    earlier = Candidate.of(Schedule.parse({**load_schedule("areal").model_dump(), "dispatch": "longest_first"}))
    limits = PlanLimits(max_staleness=8)
    problem = SearchProblem(profile=PROFILE, workload=WORKLOAD, devices=devices(8), limits=limits)
    scorer = InventedScores(lambda schedule: score(2.0 if schedule.dispatch == "longest_first" else 1.0))
    planner.search(problem, scorer, effort=SampleEffort(3_000), earlier=[earlier])
    assert earlier.on(8) in [schedule for schedule, _ in scorer.asked[:2]]


def test_a_search_begins_with_fewer_samples_and_compares_the_best_with_all() -> None:
    large = replace(WORKLOAD, num_devices=256, prompts_per_step=1024, samples_per_prompt=8)
    scorer = InventedScores(lambda schedule: score(100.0 + len(str(schedule)) % 11))
    search(PROFILE, large, devices(256), PlanLimits(max_staleness=2), scorer, effort=SampleEffort(40_000))
    fidelities = [fidelity for _, fidelity in scorer.asked]
    assert {each.thin for each in fidelities[:20]} == {4}
    assert 0 < sum(each.thin == 1 for each in fidelities) < sum(each.thin == 4 for each in fidelities)


def test_a_small_cache_still_holds_the_longest_sample_of_fewer() -> None:
    """A single sample runs even if it does not fit, so a cache of one sample took half of its time."""
    large = replace(WORKLOAD, num_devices=256, prompts_per_step=1024, samples_per_prompt=8)
    longest = PROFILE.lengths.prompt_tokens + large.max_new_tokens
    for samples, thin in ((1, 1), (2, 2), (100, 4)):
        rollout = PROFILE.rollout.model_copy(update={"kv_tokens": samples * longest})
        assert large.find_thinning(32, PROFILE.model_copy(update={"rollout": rollout})) == thin


def test_a_short_search_simulates_the_baseline_first() -> None:
    scorer = InventedScores(lambda _: score(1.0))
    search(PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), scorer, effort=SampleEffort(3_000))
    (first, _), *_ = scorer.asked
    assert first == Candidate.of(load_schedule("verl-colocated")).on(8)


def test_a_short_search_ranks_by_one_fidelity() -> None:
    """The effort allowed a closer simulation of the baseline only, which became the best plan of a faster one."""
    large = replace(WORKLOAD, num_devices=256, prompts_per_step=512, samples_per_prompt=16)
    rule = lambda schedule: score(1.0 if schedule.staleness_bound == 0 else 2.0)  # noqa: E731
    for num_samples in (2_000, 20_000, 45_000):
        effort = SampleEffort(num_samples)
        found = search(PROFILE, large, devices(256), PlanLimits(max_staleness=4), InventedScores(rule), effort=effort)
        assert found.best.score.tokens_per_s == 2.0


def test_one_round_of_decisions_may_change_all_of_them() -> None:
    """A round of all neighbours changed one decision for the same effort."""
    wanted = {"on_update": "keep", "dispatch": "longest_first", "weight_update": "rolling", "publish": "background"}
    rule = lambda schedule: score(1.0 + sum(getattr(schedule, name) == wanted[name] for name in wanted))  # noqa: E731
    found = search(
        PROFILE, WORKLOAD, devices(8), PlanLimits(max_staleness=4), InventedScores(rule), effort=SampleEffort(100_000)
    )
    assert found.best.score.tokens_per_s == 5.0


def test_a_likely_step_waits_for_the_longest_response_if_engines_drain() -> None:
    split = {"placement": {"rollout": "0-50%", "actor": "50-100%"}, "batching": "arrival", "max_staleness": 2}
    lengths = PROFILE.lengths.model_copy(update={"prompt_sigma": 1.0, "response_sigma": 1.0})
    profile = PROFILE.model_copy(update={"lengths": lengths})
    keeps, drains = (
        estimate_step(Schedule.parse({**split, "on_update": mode}), profile, WORKLOAD, devices(8))
        for mode in ("keep", "drain")
    )
    assert keeps.least_s == drains.least_s <= keeps.likely_s < drains.likely_s
