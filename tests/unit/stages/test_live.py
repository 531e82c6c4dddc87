"""A schedule that changes between two steps: every sample trains once, within the bound that it was admitted with."""

import pytest

from interlace.core.types import TerminalEvent
from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import Simulated, run_virtually
from interlace.run.host import Hosted
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.schedule import Schedule

SPLIT = {"rollout": "0-75%", "reference": "75-100%", "critic": "75-100%", "actor": "75-100%"}
AHEAD = Schedule.parse({
    "placement": SPLIT, "max_staleness": 4, "pipeline_depth": 4, "batching": "arrival", "on_update": "abort_resume",
})  # fmt: skip
STEPS = 16
SIZES = ["prompts_per_step=8", "samples_per_prompt=4", "sampling.max_new_tokens=4000", f"steps={STEPS}"]


def other(**fields: object) -> Schedule:
    return Schedule.parse({**AHEAD.model_dump(), **fields})


def run(changes: dict[int, Schedule], start: Schedule = AHEAD) -> tuple[Simulated, Hosted]:
    """Runs on 8 virtual devices; the schedule changes after each given step."""
    kept: list[Hosted] = []

    def on_step(result: StepResult) -> bool:
        if result.step in changes:
            kept[0].live.become(changes[result.step])
        return True

    recipe = set_schedule(load_recipe("longtail", SIZES), start)
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    done = run_virtually(
        recipe, simulation, name="live", recorder=NoRecorder, on_step=on_step, on_hosted=kept.append
    )  # fmt: skip
    return done, kept[0]


@pytest.mark.parametrize(
    "changes",
    [
        {4: other(max_staleness=1, pipeline_depth=1), 10: AHEAD},
        {4: other(dispatch="longest_first"), 8: other(dispatch="skew_aware"), 12: AHEAD},
        {4: other(concurrency=2), 10: other(concurrency="adaptive")},
        {4: other(on_update="keep"), 10: other(on_update="drain")},
        {4: other(placement={**SPLIT, "rollout": "0-25%"}), 10: AHEAD},
    ],
    ids=["bound", "dispatch", "concurrency", "on_update", "engines"],
)
def test_every_sample_trains_once_within_its_bound(changes: dict[int, Schedule]) -> None:
    done, _ = run(changes)
    trained = [ended.sample for ended in done.events if ended.event == TerminalEvent.TRAINED]
    assert len(done.results) == STEPS
    assert len(trained) == len({sample.key for sample in trained}) == STEPS * 8 * 4
    assert max(result.metrics["sched/staleness_max"] for result in done.results) <= 4
    last = max(changes)
    settled = done.results[last + 5 :]
    bound = changes[last].staleness_bound
    assert all(result.metrics["sched/staleness_max"] <= bound for result in settled)


def test_a_smaller_bound_holds_once_older_samples_are_trained() -> None:
    done, _ = run({4: other(max_staleness=1, pipeline_depth=1)})
    assert all(result.metrics["sched/staleness_max"] <= 1 for result in done.results[9:])
    assert any(result.metrics["sched/staleness_max"] > 1 for result in done.results[:9])


def test_engines_that_a_placement_leaves_out_are_away_and_return() -> None:
    few = other(placement={**SPLIT, "rollout": "0-25%"})
    _, hosted = run({4: few})
    away = [driver.is_away for driver in hosted.run.rollout.pool.drivers]
    assert away == [False, False, True, True, True, True]
    _, hosted = run({4: few, 8: AHEAD})
    assert not any(driver.is_away for driver in hosted.run.rollout.pool.drivers)


def test_an_adaptive_limit_keeps_what_it_has_learned() -> None:
    adaptive = other(concurrency="adaptive")
    _, hosted = run({}, start=adaptive)
    (driver, *_) = hosted.run.rollout.pool.drivers
    before = driver.calls.limit
    driver.follow(other(concurrency="adaptive", max_staleness=1, pipeline_depth=1))
    assert driver.calls.limit is before
    driver.follow(other(concurrency=2))
    assert driver.calls.limit.value == 2


def test_what_needs_a_restart_is_refused() -> None:
    _, hosted = run({})
    live = hosted.live
    moved = {**SPLIT, "rollout": "0-50%", "actor": "50-100%"}
    for schedule in (
        other(sync_every=2),
        other(placement=moved),
        other(placement={**SPLIT, "rollout": "all"}),
        other(publish="background"),
    ):
        assert not live.may_become(schedule)
        with pytest.raises(ValueError, match="restart"):
            live.become(schedule)
    assert live.may_become(other(max_staleness=2, pipeline_depth=1))
    live.limit_adapters()
    assert not live.may_become(other(on_update="drain"))


def test_samples_do_not_depend_on_a_change_of_dispatch() -> None:
    """Lengths are keyed by the sample, so a change moves work and loses none."""
    plain, _ = run({})
    moved, _ = run({4: other(dispatch="least_tokens")})
    assert {ended.sample.key for ended in plain.events if ended.event == TerminalEvent.TRAINED} == {
        ended.sample.key for ended in moved.events if ended.event == TerminalEvent.TRAINED
    }
