"""Measured plans are compared as ratios to the reference around them, and plans within its noise are tied."""

import math

import pytest

from interlace.forecast.profile import probe
from interlace.forecast.profile.probe import ProbeComparison, Probed, Probes, Speed, compare_schedules, noise
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Planned, Score
from interlace.run.recipe.config import DEFAULT_SCHEDULE
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule


def speed(tokens_per_s: float) -> Speed:
    return Speed(step_s=1000 / tokens_per_s, tokens_per_s=tokens_per_s)


def compare(tokens_per_s: float, before: float, after: float) -> ProbeComparison:
    return ProbeComparison(speed=speed(tokens_per_s), before=speed(before), after=speed(after))


def probed(name: str, comparison: ProbeComparison) -> Probed:
    schedule = load_schedule(name)
    score = Score(
        step_s=1.0, error_s=0.0, tokens_per_s=1000.0, goodput=0.5, staleness_mean=0.0, staleness_max=0.0,
        length_shift=0.0,
    )  # fmt: skip
    plan = Planned(
        name=name, schedule=schedule, score=score, staleness_bound=schedule.staleness_bound,
        candidate=Candidate.of(schedule, name),
    )  # fmt: skip
    return Probed(plan=plan, comparison=comparison)


def test_a_ratio_does_not_depend_on_a_slow_drift_of_the_machine() -> None:
    fast, slow = compare(120.0, 90.0, 110.0), compare(60.0, 45.0, 55.0)
    assert fast.ratio == pytest.approx(1.2)
    assert slow.ratio == pytest.approx(fast.ratio)
    assert noise([fast, slow]) == pytest.approx(math.log(11 / 9))
    assert noise([]) == 0.0


def test_plans_within_the_noise_of_the_reference_are_tied() -> None:
    quiet = Probes(
        probed=[probed("areal", compare(110.0, 100.0, 101.0)), probed(DEFAULT_SCHEDULE, compare(100.0, 101.0, 100.0))]
    )
    assert quiet.chosen.name == "areal"
    assert "A tie" not in quiet.text()
    noisy = Probes(
        probed=[probed("areal", compare(110.0, 80.0, 120.0)), probed(DEFAULT_SCHEDULE, compare(100.0, 120.0, 80.0))]
    )
    assert noisy.chosen.name == "areal"
    assert f"A tie between areal, {DEFAULT_SCHEDULE}" in noisy.text()
    assert [row["tied"] for row in noisy.json()] == [True, True]


def test_each_schedule_runs_between_two_runs_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Schedule] = []

    def measure(_recipe: object, schedule: Schedule, *, num_steps: int) -> Speed:
        ran.append(schedule)
        return speed(float(num_steps + len(ran)))

    monkeypatch.setattr(probe, "measure", measure)
    one, two, reference = load_schedule("areal"), load_schedule("one-step-off"), load_schedule(DEFAULT_SCHEDULE)
    first, second = compare_schedules(load_recipe("quickstart"), [one, two], num_steps=4)
    assert ran == [reference, one, reference, two, reference]
    assert first.after == second.before
