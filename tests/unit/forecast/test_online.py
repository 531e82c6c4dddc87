"""schedule=auto: the valid settings of a recipe, and a run whose planner changes the schedule."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.errors import UserError
from interlace.flows.steps import StepResult
from interlace.forecast import online
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.decisions import DECISION_EFFORT, LiveDecision, LiveSearch
from interlace.forecast.observed import with_lengths, with_tools
from interlace.forecast.online import LONGEST_SEARCH_S, LOWEST, SEARCH_S, OnlinePlanner, limit_search
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan
from interlace.forecast.recipe_check import AcceptsHere
from interlace.forecast.search.candidates import Candidate, warm_up_steps
from interlace.forecast.search.plans import Planned, SearchResult, accept_all
from interlace.forecast.search.replanner import AT_MOST, RECENT
from interlace.forecast.simulate import Simulation, simulate
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.check_settings import check_placement
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from tests.support.plan_search import score


def test_auto_takes_a_bound_and_nothing_else() -> None:
    open_one = load_recipe("longtail", ["schedule={preset: auto, max_staleness: 4}"])
    assert open_one.schedule.open
    assert open_one.model_dump(mode="json")["schedule"] == {"preset": "auto", "max_staleness": 4.0}
    assert load_recipe("longtail", ["schedule=auto"]).schedule.resolved == Schedule()
    with pytest.raises(UserError, match="dispatch cannot be given beside it"):
        load_recipe("longtail", ["schedule={preset: auto, dispatch: least_tokens}"])


def test_what_was_chosen_is_in_the_runs_settings(tmp_path) -> None:
    from interlace.core.yaml_text import to_yaml

    chosen = set_schedule(load_recipe("longtail", ["schedule=auto"]), load_schedule("areal"), "auto")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(chosen.model_dump(mode="json")))
    again = load_recipe(str(path))
    assert again == chosen
    assert not again.schedule.open


def test_what_does_not_train_refuses_an_open_schedule() -> None:
    recipe = load_recipe("longtail", ["schedule=auto"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=4)
    with pytest.raises(UserError, match="interlace plan"):
        check_placement(recipe, simulation.devices)


def test_measured_lengths_take_the_place_of_the_profiles() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    assert with_lengths(profile, [5] * 3) is profile  # too few to say anything
    fitted = with_lengths(profile, range(1, 1001))
    assert fitted.lengths.quantiles[0] == 1
    assert fitted.lengths.quantiles[-1] == 1000
    assert fitted.lengths.quantiles[16] == pytest.approx(500, abs=2)
    assert fitted.rollout == profile.rollout


def request(num_steps: int) -> PlanRequest:
    sizes = ["prompts_per_step=4", "samples_per_prompt=2", "sampling.max_new_tokens=4000", f"steps={num_steps}"]
    return PlanRequest(
        recipe=load_recipe("longtail", sizes),
        simulation=Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=4, num_prompts=64),
        settings=PlanSettings(max_staleness=2, search_s=600, search_samples=4_000, search_processes=1),
    )


def steps_under(schedule: Schedule, asked: PlanRequest) -> list[StepResult]:
    return list(simulate(set_schedule(asked.recipe, schedule), asked.simulation).results)


def test_a_run_that_drifts_is_planned_again_and_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "REST_PER_SEARCH", 0.0)
    asked = request(40)
    poor = load_schedule("rlinf-disaggregated")
    results = steps_under(poor, asked)
    # The number of simulated samples ends the search, on a busy machine too.
    planner = OnlinePlanner(asked, poor, results[0].metrics["timing_s/step"] / 3, accepts=accept_all, search_s=600.0)
    planner.started(1.0)
    changed = None
    for result in results:
        metrics = planner.on_step(result, QuietProgress())
        assert metrics["plan/predicted_s"] > 0
        planner.wait()
        if changed := planner.take_change():
            break
    planner.close()
    assert changed is not None and changed != poor
    before = sum(result.metrics["timing_s/step"] for result in results[8:16])
    after = sum(result.metrics["timing_s/step"] for result in steps_under(changed, asked)[8:16])
    assert after < 0.9 * before


def test_a_good_schedule_is_left_alone() -> None:
    asked = request(40)
    first = steps_under(load_schedule("async-colocated"), asked)
    planner = OnlinePlanner(asked, load_schedule("async-colocated"), 1.0, accepts=accept_all)
    for result in first:  # it was never told what a change costs
        planner.on_step(result, QuietProgress())
        planner.wait()
        assert planner.change is None
    planner.close()


def test_a_search_has_the_lowest_priority() -> None:
    """At that of training it kept a core from a trainer's threads, which wait for one another."""
    planner = OnlinePlanner(request(4), load_schedule("areal"), 1.0, accepts=accept_all)
    [niceness] = planner._process.map(os.nice, [0])
    planner.close()
    assert niceness == LOWEST


def test_a_run_that_ends_soon_is_not_searched() -> None:
    """A search of six seconds in a run of eight took a third of its speed."""
    schedule = load_schedule("async-colocated")
    results = steps_under(schedule, request(40))
    for step_s, searches in ((0.1, False), (100.0, True)):
        planner = OnlinePlanner(request(40), schedule, step_s, accepts=accept_all)
        process = planner._pool = Process(*[None] * 40)
        planner.started(1.0, lambda _: True)
        for result in results[:12]:
            slower = replace(result, metrics={**result.metrics, "timing_s/step": step_s * (1 + result.step / 10)})
            planner.on_step(slower, QuietProgress())
            if process.num_asked:
                break
        assert (process.num_asked > 0) == searches
        planner.close()


def test_a_search_may_take_a_hundredth_of_the_remaining_time() -> None:
    """Every search took six seconds, in which it scored nine schedules of a large step."""
    assert [limit_search(left_s) for left_s in (10, 2_000, 1_000_000)] == [SEARCH_S, 20.0, LONGEST_SEARCH_S]


class Ready:
    """Result of the search process that is there at once."""

    def __init__(self, plan: RecipePlan | None) -> None:
        self.plan = plan

    def ready(self) -> bool:
        return True

    def get(self) -> RecipePlan:
        if self.plan is None:
            raise UserError("a test's schedule cannot be simulated")
        return self.plan


class Process:
    """Search process of a test, which makes the given plans in turn."""

    def __init__(self, *plans: RecipePlan | None) -> None:
        self.plans, self.num_asked = list(plans), 0

    def apply_async(self, _job: object, _arguments: object) -> Ready:
        self.num_asked += 1
        return Ready(self.plans[self.num_asked - 1])

    def terminate(self) -> None: ...


def planner_with(*plans: RecipePlan | None) -> tuple[OnlinePlanner, Process]:
    planner, process = OnlinePlanner(request(40), load_schedule("areal"), 1.0, accepts=accept_all), Process(*plans)
    planner._pool = process
    planner.started(1.0, lambda _: True)
    return planner, process


def take_steps(planner: OnlinePlanner, step_s: Sequence[float]) -> Schedule | None:
    """Gives a planner steps of these durations, each with a publication. Returns its change, at which it stops."""
    result = steps_under(load_schedule("one-step-off"), request(2))[0]
    for step, seconds in enumerate(step_s, start=1):
        metrics = {**result.metrics, "timing_s/step": seconds}
        planner.on_step(replace(result, step=step, version=step, metrics=metrics), QuietProgress())
        if changed := planner.take_change():
            return changed
    return None


DRIFT = (1.0,) * RECENT + (2.0,) * 25


def test_a_run_too_short_for_a_search_changes_in_place_after_drift() -> None:
    """A search takes six seconds and a table of all schedules took minutes, so short runs kept any schedule."""
    behind = Schedule.parse({**load_schedule("pipelinerl").model_dump(), "max_staleness": 2, "pipeline_depth": 0})
    planner = OnlinePlanner(request(60), behind, 0.2, accepts=accept_all)
    process = planner._pool = Process()
    planner.started(1e9, lambda wanted: wanted.placement == behind.placement)
    seconds = [0.2 * each for each in DRIFT]
    assert take_steps(planner, seconds[:RECENT]) is None and planner._in_place._search is None, "nothing has drifted"
    changed = take_steps(planner, seconds)
    assert changed is not None and changed.depth > 0 and process.num_asked == 0
    assert changed == planner.schedule and planner._earlier.candidates[-1].rest.depth == 0
    assert 0 < planner._rule.predicted_s < 0.4, "measured seconds of a step, divided by the predicted gain"


def test_decisions_in_place_take_a_twentieth_of_the_remaining_time() -> None:
    """Each simulates for 200 ms, in which the run waits: as long as two steps of the quick start."""
    for scale, num_decisions in ((0.01, 0), (0.1, 1)):
        planner, _ = planner_with()
        take_steps(planner, [scale * each for each in DRIFT])
        assert planner._in_place._effort <= num_decisions * 2 * DECISION_EFFORT
        assert (planner._in_place._effort > 0) == bool(num_decisions)


def test_the_effort_of_a_search_follows_the_speed_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a run is slow, and its prediction may be ten times too long."""
    allowed = list[int]()
    monkeypatch.setattr(LiveSearch, "decide", lambda search: allowed.append(search.effort_left))
    take_steps(planner_with()[0], [10.0, 0.01, 0.01])
    assert 0 < allowed[1] < allowed[0]


@pytest.mark.parametrize(("token_s", "is_back"), [(1e-6, True), (1e6, False)])
def test_a_change_in_place_after_which_steps_are_slower_is_undone(token_s: float, is_back: bool) -> None:
    """Few samples make steps of synchronous schedules too short, so that a prediction may be wrong."""
    planner, _ = planner_with()
    before = load_schedule("areal").model_copy(update={"pipeline_depth": 1.0})
    planner._in_place._before = (before, token_s)
    num_steps = warm_up_steps(planner.schedule) + RECENT
    assert take_steps(planner, [0.01] * (num_steps - 1)) is None
    assert take_steps(planner, [0.01]) == (before if is_back else None)
    assert take_steps(planner, [0.01] * 30) is None, "it is compared once"


def test_a_search_that_a_change_in_place_ended_begins_again() -> None:
    planner, process = planner_with(*[None] * 9)
    planner._request = replace(planner._request, recipe=request(4000).recipe)
    planner._search = Ready(None)
    planner._next = LiveDecision(schedule=load_schedule("areal"), step_s=0.5, current_s=1.0)
    planner.take_change()
    planner._pool = process
    take_steps(planner, [100.0])
    assert process.num_asked == 1


def test_a_run_without_some_devices_changes_in_place_on_all_that_it_counts() -> None:
    """The planner numbers the devices that are left without gaps, so each of its schedules restarted the run."""
    planner, _ = planner_with(None)
    trained = dict.fromkeys(("reference", "critic", "actor"), "3")
    running = Schedule.parse({**load_schedule("areal").model_dump(), "placement": {"rollout": "0-2", **trained}})
    planner.started(1.0, lambda wanted: wanted.placement == running.placement)
    planner.follow_devices([0, 2, 3], running)
    take_steps(planner, [100.0])
    assert planner._in_place._search is not None, "a loss of devices is drift"
    found = planner.schedule.model_copy(update={"pipeline_depth": 1.0})
    planner._next = LiveDecision(schedule=found, step_s=0.5, current_s=1.0)
    assert planner.take_change() == running.model_copy(update={"pipeline_depth": 1.0})
    assert planner.schedule == found


def test_slower_rewards_and_tools_scale_the_profile_and_begin_decisions() -> None:
    """Searches refitted lengths only, so a tool that became four times as slow changed no schedule."""
    planner, _ = planner_with()
    before = planner._request.simulation.profile
    first = steps_under(load_schedule("one-step-off"), request(2))[0]
    begun = set[LiveSearch | None]()
    for step in range(1, 12):
        slow = 4.0 if step > 5 else 1.0
        counts = EpisodeCounts(
            num_turns=1, num_branches=1, history_tokens=0, reused_tokens=0, tool_s=(10 * slow,), tool_turns=(0,)
        )
        ended = [replace(each, sample=replace(each.sample, counts=counts)) for each in first.ended]
        metrics = {**first.metrics, "timing_s/step": 100.0, "perf/reward_call_s": 5 * slow}
        planner.on_step(replace(first, step=step, version=step, metrics=metrics, ended=ended), QuietProgress())
        begun.add(planner._in_place._search)
    profile = planner._request.simulation.profile
    assert profile.reward.median_s == pytest.approx(4 * before.reward.median_s)
    assert len(begun - {None}) == 2, "at the start, and after the change"
    assert with_tools(profile, 4.0) is profile  # its episodes have no turns


def plan_for(current: Schedule, best: Schedule) -> RecipePlan:
    """Returns the outcome of a search in which the best schedule is twice as fast as the current one."""
    slow, fast = (
        Planned(name="", schedule=each, score=score(1000 / step_s), staleness_bound=4, candidate=Candidate.of(each))
        for each, step_s in ((current, 1.0), (best, 1.0 if best == current else 0.5))
    )
    found = SearchResult(
        ranked=[fast], tied=[fast], baseline=None, current=slow, front=[], why_not=[], num_scored=2, num_pruned=0
    )
    return RecipePlan(request=request(40), found=found)


def test_a_plan_that_needs_no_restart_is_taken_at_once() -> None:
    planner, _ = planner_with()
    areal = load_schedule("areal")
    best = Schedule.parse({**areal.model_dump(), "max_staleness": 2})
    planner.started(1e9, lambda _: True)
    planner._decide_change(plan_for(areal, best), 2, QuietProgress())
    assert planner.take_change() == best


def test_a_search_ends_without_a_decision_after_a_change_of_the_schedule_or_of_the_costs() -> None:
    """Its plans were compared with the schedule before a change in place, and with the costs before a drift."""
    areal = load_schedule("areal")
    other = Schedule.parse({**areal.model_dump(), "max_staleness": 2})
    planner, _ = planner_with()
    planner._search, planner._next = Ready(None), LiveDecision(schedule=other, step_s=0.5, current_s=1.0)
    assert planner.take_change() == other and planner._search is None
    planner._search = Ready(None)
    for cost in (1.0,) * RECENT + (4.0,) * RECENT:
        planner._observed.tools.observe(cost, 0.5)
    planner._refit_costs(QuietProgress())
    assert planner._search is None
    assert planner._pool is None, "an obsolete search of a minute delayed the next one"


def test_a_plan_after_a_loss_of_devices_is_for_the_devices_that_are_left() -> None:
    """Plans for devices that had disappeared could not be followed, and the loss alone made no plan due."""
    planner, _ = planner_with(*[None] * 9)
    trained = dict.fromkeys(("reference", "critic", "actor"), "3")
    schedule = Schedule.parse({**load_schedule("areal").model_dump(), "placement": {"rollout": "0-2", **trained}})
    planner._schedule, planner._next = schedule, LiveDecision(schedule=schedule, step_s=0.5, current_s=1.0)
    planner.follow_devices([0, 2, 3], schedule)
    assert planner._request.simulation.num_devices == 3 and planner.change is None
    assert [planner.schedule.placement.of(role).devices for role in ("rollout", "actor")] == ["0-1", "2"]
    result = steps_under(load_schedule("one-step-off"), request(2))[0]
    planner.on_step(replace(result, step=1, version=1), QuietProgress())
    assert planner._search is not None, "a plan is due at once"
    planner.follow_devices(range(4), schedule)
    assert (planner._request.simulation.num_devices, planner.schedule) == (4, schedule)
    assert planner.fit_devices(2).instances("actor", planner._request.simulation.devices)
    assert planner._request.simulation.num_devices == 2
    assert planner.fit_devices(2) == planner.schedule


def test_plans_for_other_devices_are_checked_on_these() -> None:
    """The search process refused each plan that named a device beyond the ones at the start of the run."""
    asked = request(40)
    two = replace(asked.simulation, num_devices=2)
    recipe = load_recipe("quickstart", ["cluster.devices=cpu:2"])
    asked, accepts = replace(asked, simulation=two), AcceptsHere(recipe, two.devices, 8)
    planner = OnlinePlanner(asked, load_schedule("one-step-off"), 1.0, accepts=accepts)
    planner._pool = Process()
    four = planner.fit_devices(4)
    assert [each.index for each in four.instances("actor", planner._request.simulation.devices)[0]][-1] == 3
    assert accepts(four) and planner._accepts(four) is None
    planner.close()


def test_the_cost_of_a_restart_counts_the_end_of_the_process_before_it() -> None:
    planner, _ = planner_with()
    planner._leaving_s = time.monotonic() - 100.0  # a change was decided, and the checkpoint written
    planner.started(5.0)
    assert planner._rule.switch_s >= 100.0
    planner.started(5.0)  # after a loss
    assert planner._rule.switch_s == 5.0


def count_searches(planner: OnlinePlanner, num_steps: int, last_lengths: float = 1.0) -> list[int]:
    """Runs steps of equal duration. Returns the searches after each. last_lengths: share of the last step's samples."""
    planner._may_become = lambda _: False
    result = steps_under(load_schedule("one-step-off"), request(2))[0]
    by_length = sorted(result.ended, key=lambda each: each.sample.num_tokens)
    asked, metrics = [], {**result.metrics, "timing_s/step": 1e4}
    for step in range(1, num_steps + 1):
        ended = result.ended if step < num_steps else by_length[: round(last_lengths * len(by_length))]
        planner.on_step(replace(result, step=1, version=step, metrics=metrics, ended=ended), QuietProgress())
        asked.append(planner._process.num_asked)
    return asked


def test_a_steady_run_is_not_searched_again_until_lengths_change() -> None:
    """A search in every 25 steps competed with the run for the processors, and had the inputs of the one before it."""
    planner, _ = planner_with(*[plan_for(load_schedule("areal"), load_schedule("areal"))] * 99)
    asked = count_searches(planner, 61, last_lengths=0.25)
    assert [asked[step - 1] for step in (AT_MOST - 1, AT_MOST, 60, 61)] == [0, 1, 1, 2]


def test_a_search_that_found_nothing_or_had_other_costs_is_repeated() -> None:
    """The steady lengths let neither be repeated, also after a loss of devices."""
    planner, _ = planner_with(*[None] * 9)
    asked = count_searches(planner, 60)
    assert [asked[step - 1] for step in (AT_MOST, 2 * AT_MOST, 60)] == [1, 1, 2]
    observed = planner._observed
    observed.note_search()
    assert not observed.has_other_lengths
    for cost in (1.0,) * RECENT + (4.0,) * RECENT:
        observed.tools.observe(cost, 0.5)
    planner._refit_costs(QuietProgress())
    assert observed.has_other_lengths
