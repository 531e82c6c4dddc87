"""The gain from a second device and the interference of concurrent work are measured from whole steps."""

from dataclasses import replace

import pytest

from interlace.forecast.profile.layouts import LAYOUTS
from interlace.forecast.profile.profile import with_zero_lr
from interlace.forecast.profile.steps import simulate_steps
from interlace.forecast.profile.types import Interference
from tests.unit.forecast.profile.test_profile_steps import PROFILE, RECIPE

SHARED, APART = LAYOUTS


def test_the_speed_of_two_devices_is_found_in_steps_that_share_them() -> None:
    recipe = with_zero_lr(RECIPE, SHARED.schedule(2))
    truth = PROFILE.model_copy(update={"actor": PROFILE.actor.model_copy(update={"efficiency": 0.7})})
    found = SHARED.refined(PROFILE, simulate_steps(truth, recipe, 2), recipe, 2)
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
    found = APART.refined(start, real, recipe, 2)
    said = simulate_steps(found, recipe, 2)
    assert said.step_s == pytest.approx(real.step_s, rel=0.03)
    slowdowns = {(pair.role, pair.beside): pair.slowdown for pair in found.interference}
    assert slowdowns["rollout", "rollout"] == 1.3, "here no two engines work at once"
    assert slowdowns["actor", "rollout"] == pytest.approx(1.8, rel=0.1)


def replace_slowdown(pair: Interference) -> Interference:
    return pair if pair.role == pair.beside else pair.model_copy(update={"slowdown": 1.0})


def test_work_that_never_meets_teaches_nothing() -> None:
    recipe = with_zero_lr(RECIPE, SHARED.schedule(2))
    real = simulate_steps(PROFILE, recipe, 2)
    slower = replace(real, trains_s=[2 * each for each in real.trains_s])
    pairs = {(pair.role, pair.beside) for pair in APART.refined(PROFILE, slower, recipe, 2).interference}
    assert ("actor", "rollout") not in pairs
