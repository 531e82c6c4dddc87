"""Decisions with few simulated samples: at the start of a run, and between the schedules that need no restart."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.decisions import (
    DECISION_EFFORT,
    LiveDecision,
    LiveSearch,
    choose_start,
    list_live,
    with_growth,
)
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan
from interlace.forecast.profile.types import Turns
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Fidelity, Planned, Score, SearchResult
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.stages.factory import LIVE
from tests.support.plan_search import score


def quickstart_request(max_staleness: int, **profile: object) -> PlanRequest:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800").model_copy(update=profile), num_devices=8)
    sizes = ["prompts_per_step=16", "samples_per_prompt=8", "sampling.max_new_tokens=4000", "steps=40"]
    settings = PlanSettings(max_staleness=max_staleness)
    return PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)


def make_search(current: Schedule, *, effort: int = 10**9, earlier: Sequence[Schedule] = ()) -> LiveSearch:
    return LiveSearch(quickstart_request(4), current, earlier, is_allowed=lambda _: True, effort=effort)


def count_effort(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Schedule], float]) -> list[int]:
    """Replaces simulations. Returns the list to which each adds its simulated samples. seconds: of a step."""
    spent = list[int]()

    def simulate(place: Workplace, schedule: Schedule, fidelity: Fidelity) -> Score:
        workload, num_steps = quickstart_request(4).workload, fidelity.num_steps(schedule)
        spent.append(fidelity.count_samples(num_steps, workload))
        return replace(score(1000.0), step_s=seconds(schedule))

    monkeypatch.setattr(Workplace, "score", simulate)
    return spent


def test_a_decision_simulates_few_samples_and_keeps_them_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all schedules at four lengths took 100,000 samples, so no run of minutes had one."""
    spent = count_effort(monkeypatch, lambda schedule: 1.0 + schedule.depth)
    search, decisions = make_search(load_schedule("areal")), list[LiveDecision | None]()
    while not search.is_done:
        before = len(spent)
        decisions.append(search.decide())
        assert sum(spent[before:]) <= DECISION_EFFORT
    assert len(decisions) > 5 and len(spent) > 15
    first, last = decisions[0], decisions[-1]
    assert first and first.schedule == load_schedule("areal") and not first.pays(0.0)
    assert last and last.schedule.depth < 1 and (last.step_s, last.current_s) == (1.0 + last.schedule.depth, 5.0)
    assert last.pays(0.0)


def test_the_effort_of_a_search_bounds_its_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = count_effort(monkeypatch, lambda _: 1.0)
    search = make_search(load_schedule("areal"), effort=3 * DECISION_EFFORT)
    while not search.is_done:
        search.decide()
    assert 0 <= search.effort_left < DECISION_EFFORT and 0 < sum(spent) <= 3 * DECISION_EFFORT


def test_a_present_schedule_that_is_too_large_for_a_decision_costs_no_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others with fewer steps were simulated for a whole decision, and compared with nothing."""
    spent = count_effort(monkeypatch, lambda _: 1.0)
    asked = quickstart_request(4)
    sizes = {"prompts_per_step": 13, "samples_per_prompt": 16}
    asked = replace(asked, recipe=asked.recipe.model_copy(update=sizes))
    search = LiveSearch(asked, load_schedule("areal"), (), is_allowed=lambda _: True, effort=10**9)
    assert search.is_done and search.decide() is None and not spent


def test_turns_of_agents_count_more_than_samples() -> None:
    """Contexts of 32 turns took 1.2 s of a core in a decision of 0.2 s."""
    asked, found = quickstart_request(4), []
    for turns in ((1,), (2,), (21,)):
        agents = Turns(turns=turns, given_tokens=(100,), tool_s=(1.0,))
        profile = asked.simulation.profile.model_copy(update={"turns": agents})
        recipe = load_recipe("calculator", ["prompts_per_step=1", "samples_per_prompt=2"])
        request = replace(asked, recipe=recipe, simulation=replace(asked.simulation, profile=profile, num_devices=1))
        search = LiveSearch(request, Schedule(), (), is_allowed=lambda _: True, effort=10**9)
        found.append(search._choose_fidelity(Schedule())[1])
    assert found == [6 * (2 + 10), 6 * (5 + 10), 4 * (2 * 21 * 6 + 10)]


def test_a_search_continues_from_the_schedule_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of two fields was found only if each of them was a gain at first."""
    count_effort(monkeypatch, lambda each: 1.0 - 0.2 * (each.depth == 4.0) * (1 + (each.dispatch == "longest_first")))
    current = Schedule.parse({**load_schedule("areal").model_dump(), "pipeline_depth": 0.0})
    search, changes = make_search(current), list[Schedule]()
    while not search.is_done:
        decision = search.decide()
        if decision and decision.pays(0.0):
            changes.append(decision.schedule)
            search.follow(decision.schedule)
    assert changes[-1].depth == 4.0 and changes[-1].dispatch == "longest_first" and len(changes) == 2


def test_earlier_schedules_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    current = load_schedule("areal")
    earlier = Schedule.parse({**current.model_dump(), "max_staleness": 1.5, "concurrency": 7})
    count_effort(monkeypatch, lambda each: 0.5 if each == earlier else 1.0)
    search = make_search(current, earlier=[earlier])
    search.decide()
    decision = search.decide()
    assert decision and decision.schedule == earlier


def test_a_gain_within_the_error_of_few_steps_does_not_pay() -> None:
    """Six simulated steps of long-tailed answers differ by a third."""
    for error, pays in ((0.0, True), (0.6, True), (0.8, False)):
        assert LiveDecision(schedule=Schedule(), step_s=0.5, current_s=1.0, error=error).pays(0.0) is pays


def test_a_decision_is_simulated_while_another_loop_runs() -> None:
    """A run decides in its event loop, in which no other loop can run."""

    async def decide() -> LiveDecision | None:
        return make_search(load_schedule("one-step-off")).decide()

    decision = asyncio.run(decide())
    assert decision is not None and decision.current_s > 0


def test_listed_schedules_differ_in_fields_that_need_no_restart() -> None:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    current = load_schedule("areal")
    listed = list(list_live(current, 4, simulation))
    assert current not in listed and len(listed) > 15
    for schedule in listed:
        differing = {name for name in Schedule.model_fields if getattr(schedule, name) != getattr(current, name)}
        assert differing and differing <= LIVE


def test_growth_keeps_the_shape_of_the_lengths() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    grown = with_growth(profile, 2.0).lengths
    assert grown.median == 2 * profile.lengths.median
    assert grown.prompt_sigma == profile.lengths.prompt_sigma


def plan_with_ties(settings: PlanSettings) -> RecipePlan:
    """Returns a plan with three tied schedules; the second of the two that are not stale is faster for long answers."""
    sizes = ["prompts_per_step=16", "samples_per_prompt=8", "sampling.max_new_tokens=4000", "minibatches=1"]
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    recipe = load_recipe("quickstart", sizes)
    tied = []
    for engines, bound in (("0", 0), ("all", 0), ("all", 4)):
        ahead = {"max_staleness": bound, "batching": "arrival"} if bound else {}
        schedule = Schedule.parse({"placement": {"rollout": engines}, **ahead})
        candidate = Candidate.of(schedule, devices=simulation.devices)
        tied.append(
            Planned(name="", schedule=schedule, score=score(1000.0), staleness_bound=bound, candidate=candidate)
        )
    found = SearchResult(
        ranked=tied, tied=tied, baseline=None, current=None, front=[], why_not=[], num_scored=3, num_pruned=0
    )
    assert found.least_stale is tied[0]
    return RecipePlan(request=PlanRequest(recipe=recipe, simulation=simulation, settings=settings), found=found)


def test_a_run_begins_with_the_tied_plan_that_is_the_fastest_if_responses_double() -> None:
    """Plans with one engine and with two were tied for short answers, and the run began with one."""
    made = plan_with_ties(PlanSettings(search_s=600))
    assert choose_start(made) is made.found.tied[1]


def test_a_choice_between_tied_plans_that_takes_too_long_ends() -> None:
    """On eight devices with 2,048 samples a step, each tied plan was simulated for seconds after the search."""
    made = plan_with_ties(PlanSettings(search_s=1e-6))
    assert choose_start(made) is made.found.tied[0]
