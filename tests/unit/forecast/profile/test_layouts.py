"""The gain from a second device and the interference of concurrent work are measured from whole steps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from interlace.forecast.profile.layouts import (
    APART,
    SHARED,
    SPREAD,
    MeasuredLayout,
    MeasuredSteps,
    fit_efficiency,
    fit_engines,
    fit_interference,
    fit_layouts,
)
from interlace.forecast.profile.profile import with_zero_lr
from interlace.forecast.profile.steps import StepTimes, scale_rollout, simulate_steps
from interlace.forecast.profile.types import Interference, Profile
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from tests.unit.forecast.profile.test_profile_steps import PROFILE

RECIPE = load_recipe("quickstart", ["cluster.devices=cpu:2", "prompts_per_step=4", "samples_per_prompt=4"])


def steps_of(recipe: Recipe, times: StepTimes) -> MeasuredSteps:
    return MeasuredSteps(recipe=recipe, times=times, num_devices=2)


def test_the_speed_of_two_devices_is_found_in_steps_that_share_them() -> None:
    recipe = with_zero_lr(RECIPE, SHARED.schedule(2))
    truth = PROFILE.model_copy(update={"actor": PROFILE.actor.model_copy(update={"efficiency": 0.7})})
    found = fit_efficiency(PROFILE, steps_of(recipe, simulate_steps(truth, recipe, 2)))
    assert found.actor.efficiency == pytest.approx(0.7, abs=0.005)


def test_what_training_and_generation_cost_each_other_is_found_in_steps_that_do_both() -> None:
    recipe = with_zero_lr(RECIPE, APART.schedule(2))
    pairs = (
        Interference(role="actor", beside="rollout", slowdown=1.8),
        Interference(role="rollout", beside="actor", slowdown=1.4),
        Interference(role="rollout", beside="rollout", slowdown=1.3),
    )
    truth = PROFILE.model_copy(update={"interference": pairs})
    start = truth.model_copy(update={"interference": tuple(replace_slowdown(pair) for pair in pairs)})
    real = simulate_steps(truth, recipe, 2)
    found = fit_interference(start, steps_of(recipe, real))
    said = simulate_steps(found, recipe, 2)
    assert said.step_s == pytest.approx(real.step_s, rel=0.03)
    slowdowns = {(pair.role, pair.beside): pair.slowdown for pair in found.interference}
    assert slowdowns["rollout", "rollout"] == 1.3, "here no two engines work at once"
    assert slowdowns["actor", "rollout"] == pytest.approx(1.8, rel=0.1)


def replace_slowdown(pair: Interference) -> Interference:
    return pair if pair.role == pair.beside else pair.model_copy(update={"slowdown": 1.0})


def test_steps_determine_both_slowdowns_of_a_call_in_proportion() -> None:
    recipe = with_zero_lr(RECIPE, APART.schedule(2))
    pair = Interference(role="actor", beside="rollout", slowdown=1.2, call_slowdown=3.0)
    truth = PROFILE.model_copy(update={"interference": (pair,)})
    start = truth.model_copy(
        update={"interference": (pair.model_copy(update={"slowdown": 1.1, "call_slowdown": 2.0}),)}
    )
    [found] = [
        each
        for each in fit_interference(start, steps_of(recipe, simulate_steps(truth, recipe, 2))).interference
        if each.role == "actor"
    ]
    assert (found.slowdown, found.call_slowdown) == pytest.approx((1.2, 3.0), rel=0.1)


def test_work_that_never_meets_teaches_nothing() -> None:
    recipe = with_zero_lr(RECIPE, SHARED.schedule(2))
    real = simulate_steps(PROFILE, recipe, 2)
    slower = replace(real, trains_s=[2 * each for each in real.trains_s])
    pairs = {(pair.role, pair.beside) for pair in fit_interference(PROFILE, steps_of(recipe, slower)).interference}
    assert ("actor", "rollout") not in pairs


PAIRS = (
    Interference(role="actor", beside="rollout", slowdown=1.8),
    Interference(role="rollout", beside="actor", slowdown=1.4),
)


def lay(layout: MeasuredLayout) -> Recipe:
    return with_zero_lr(RECIPE, layout.schedule(2))


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.1, 1.1, 1.21), (0.9, 0.9, 0.81)])
def test_a_drift_of_the_machine_between_layouts_is_no_interference(speeds: Sequence[float]) -> None:
    truth, seconds = PROFILE.model_copy(update={"interference": PAIRS}), iter(speeds)
    asked: list[str] = []

    def measure(_profile: Profile, layout: MeasuredLayout) -> StepTimes:
        asked.append(layout.name)
        found, factor = simulate_steps(truth, lay(layout), 2), next(seconds)
        return StepTimes(
            steps_s=[factor * each for each in found.steps_s],
            rollouts_s=[factor * each for each in found.rollouts_s],
            trains_s=[factor * each for each in found.trains_s],
        )

    found = fit_layouts(truth, simulate_steps(truth, lay(SPREAD), 2), measure, lay, 2)
    assert asked == [SHARED.name, APART.name, SPREAD.name]
    slowdowns = {(pair.role, pair.beside): pair.slowdown for pair in found.interference}
    assert slowdowns == pytest.approx({("actor", "rollout"): 1.8, ("rollout", "actor"): 1.4}, rel=0.02)
    assert found.step_noise == pytest.approx(abs(math.log(speeds[-1])), abs=1e-6)


def test_steps_that_differ_by_less_than_the_noise_keep_the_slowdowns_of_calls() -> None:
    truth = PROFILE.model_copy(update={"interference": PAIRS, "step_noise": 0.2})
    found = simulate_steps(truth, lay(APART), 2)
    slower = replace(
        found, steps_s=[1.15 * each for each in found.steps_s], trains_s=[2 * each for each in found.trains_s]
    )
    assert fit_interference(truth, steps_of(lay(APART), slower)).interference == PAIRS
    quiet = truth.model_copy(update={"step_noise": 0.05})
    assert fit_interference(quiet, steps_of(lay(APART), slower)).interference != PAIRS


def test_generation_beside_training_determines_the_slowdown_of_engines_by_engines() -> None:
    hindered = PROFILE.model_copy(
        update={"interference": (Interference(role="rollout", beside="rollout", slowdown=1.8),)}
    )
    spread, apart = (steps_of(lay(layout), simulate_steps(hindered, lay(layout), 2)) for layout in (SPREAD, APART))
    # The engines' costs as fitted to steps in which two engines work, without a slowdown by each other.
    start = PROFILE.model_copy(
        update={"rollout": scale_rollout(PROFILE.rollout, spread.compare(PROFILE, lambda times: times.rollouts_s))}
    )
    found = fit_engines(start, spread, apart)
    assert [pair.slowdown for pair in found.interference] == pytest.approx([1.8], rel=0.05)
    assert found.rollout.step_s(64) == pytest.approx(PROFILE.rollout.step_s(64), rel=0.05)
    assert fit_engines(hindered, spread, apart) == hindered, "steps as predicted change nothing"
