"""Costs scaled to whole steps: what a simulation then says is what was measured."""

import pytest

from interlace.core.profile import Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.recipes.load import load_recipe
from interlace.recipes.profile_steps import StepTimes, fitted, simulated

PROFILE = Profile(
    device="a test's",
    device_memory_bytes=2**30,
    rollout=RolloutCosts(
        steps=((1, 1e-3), (64, 3e-3)), call_s=1e-4, intake_s=1e-3, sequence_s=1e-4, prefill_token_s=1e-5, kv_tokens=8192
    ),
    actor=TrainCosts(token_s=5e-5, call_s=1e-2, optimizer_s=2e-3),
    reward=RewardCosts(median_s=5e-5, call_s=1e-4),
    lengths=Lengths(prompt_tokens=6, quantiles=(4.0, 8.0, 10.0, 24.0)),
)
RECIPE = load_recipe("quickstart", ["cluster.devices=cpu:2"])


def test_a_simulation_of_the_fitted_costs_takes_as_long_as_the_steps_did() -> None:
    real = StepTimes(step_s=0.5, rollout_s=0.2, train_s=0.15)
    found = fitted(PROFILE, real, RECIPE, 2)
    said = simulated(found, RECIPE, 2)
    assert said.rollout_s == pytest.approx(real.rollout_s, rel=0.05)
    assert said.train_s == pytest.approx(real.train_s, rel=0.05)
    assert said.step_s == pytest.approx(real.step_s, rel=0.05)
    assert found.controller_sample_s > 0


def test_a_step_that_is_no_longer_than_its_parts_leaves_nothing_to_the_controller() -> None:
    said = simulated(PROFILE, RECIPE, 2)
    found = fitted(PROFILE, said, RECIPE, 2)
    assert found.controller_sample_s * 128 < 0.02 * said.step_s
    assert found.rollout.step_s(64) == pytest.approx(PROFILE.rollout.step_s(64), rel=0.02)
    assert found.actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.02)
