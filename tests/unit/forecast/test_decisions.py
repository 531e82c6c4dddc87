"""Decisions by a table of simulated steps: at once, for the measured lengths, and only where a gain is predicted."""

import time

import pytest

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.decisions import (
    FACTORS,
    DecisionTable,
    choose_start,
    count_samples,
    list_live,
    make_table,
    with_growth,
)
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Fidelity, Planned, SearchResult, accept_all
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.stages.factory import LIVE
from tests.support.plan_search import score

SHORT, LONG = Schedule(dispatch="least_tokens"), Schedule(dispatch="longest_first")
TABLE = DecisionTable(
    lengths=(50.0, 100.0, 200.0, 400.0), rows={SHORT: (1.0, 2.0, 8.0, 16.0), LONG: (2.0, 2.0, 4.0, 8.0)}
)


@pytest.mark.parametrize(
    ("length", "best", "seconds"), [(10, SHORT, 1.0), (50, SHORT, 1.0), (200, LONG, 4.0), (9000, LONG, 8.0)]
)
def test_the_fastest_at_the_measured_length_is_chosen(length: float, best: Schedule, seconds: float) -> None:
    decision = TABLE.decide(SHORT, length)
    assert decision is not None
    assert (decision.schedule, decision.step_s) == (best, pytest.approx(seconds))
    assert decision.pays(0.0) == (best != SHORT)


def test_seconds_between_two_lengths_are_interpolated_in_logarithms() -> None:
    decision = TABLE.decide(SHORT, 100 * 2**0.5)
    assert decision is not None
    assert decision.current_s == pytest.approx(4.0)
    assert decision.step_s == pytest.approx(8**0.5)


def test_lengths_that_a_limit_cuts_have_the_seconds_that_were_simulated_for_them() -> None:
    """Responses of twice the profile's lengths are 160 tokens long here, because many reach the limit."""
    table = DecisionTable(lengths=(50.0, 100.0, 160.0, 160.0), rows=TABLE.rows)
    decision = table.decide(SHORT, 160.0)
    assert decision is not None
    assert (decision.schedule, decision.current_s) == (LONG, pytest.approx(8.0))


def test_an_unknown_current_schedule_has_no_decision() -> None:
    assert TABLE.decide(Schedule(), 100.0) is None


def test_listed_schedules_differ_in_fields_that_need_no_restart() -> None:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    current = load_schedule("areal")
    listed = list(list_live(current, 4, simulation))
    assert listed[0] == current and len(listed) > 15
    for schedule in listed[1:]:
        differing = {name for name in Schedule.model_fields if getattr(schedule, name) != getattr(current, name)}
        assert differing and differing <= LIVE
        assert schedule.staleness_bound <= 4


def test_a_table_is_simulated_and_decides_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    current = load_schedule("one-step-off")
    few = [current, Schedule.parse({**current.model_dump(), "dispatch": "least_tokens"})]
    monkeypatch.setattr("interlace.forecast.decisions.list_live", lambda *_: iter(few))
    monkeypatch.setattr("interlace.forecast.decisions.STEPS", 2)
    sizes = ["prompts_per_step=8", "samples_per_prompt=2", "sampling.max_new_tokens=4000", "steps=40"]
    request = PlanRequest(
        recipe=load_recipe("longtail", sizes),
        simulation=Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8, num_prompts=64),
        settings=PlanSettings(max_staleness=2),
    )
    table = make_table(request, current, accepts=accept_all)
    assert set(table.rows) == set(few)
    # At most: two rounds, four lengths, two schedules of two steps and two that fill the pipeline, of 16 samples.
    assert count_samples(request, current) == 2 * 4 * 2 * (2 + 3) * 16
    assert table.lengths[-1] < 4 * table.lengths[1] < 4 * 4000, "the limit of 4000 tokens cuts long responses"
    for row in table.rows.values():
        assert len(row) == len(FACTORS)
        assert row[0] < row[-1], "longer responses take longer"
    began_s = time.perf_counter()
    assert table.decide(current, table.lengths[1]) is not None
    assert time.perf_counter() - began_s < 0.2


def test_the_count_of_a_table_bounds_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """From an on-policy schedule the second round simulated longer pipelines than were counted."""
    sizes = ["prompts_per_step=8", "samples_per_prompt=2", "sampling.max_new_tokens=4000", "steps=40"]
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8, num_prompts=64)
    settings = PlanSettings(max_staleness=4)
    request = PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)
    spent = dict[Schedule, int]()

    def simulate(request: PlanRequest, schedule: Schedule, fidelity: Fidelity, _stop_at_s: float) -> tuple[float, ...]:
        assert schedule not in spent, "a schedule that cannot run is tried once"
        spent[schedule] = len(FACTORS) * fidelity.num_steps(schedule) * request.workload.requests_per_step
        return () if schedule.concurrency == 16 else (1 / (1 + schedule.max_staleness),) * len(FACTORS)

    monkeypatch.setattr("interlace.forecast.decisions._simulate", simulate)
    current = load_schedule("verl-colocated")
    make_table(request, current, accepts=accept_all)
    assert count_samples(request, current) * 0.7 < sum(spent.values()) <= count_samples(request, current)


def test_a_table_ends_at_the_limit_of_the_search() -> None:
    """At 8,192 samples a step it took minutes, because all samples of every schedule were simulated."""
    sizes = ["prompts_per_step=1024", "samples_per_prompt=8", "sampling.max_new_tokens=4000", "steps=40"]
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    settings = PlanSettings(max_staleness=4, search_samples=4000, search_s=1e4)
    request = PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)
    current = load_schedule("one-step-off")
    assert count_samples(request, current) < 120_000, "all samples are 12 million"
    began_s = time.process_time()
    table = make_table(request, current, accepts=accept_all)
    assert current in table.rows
    assert time.process_time() - began_s < 5


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
