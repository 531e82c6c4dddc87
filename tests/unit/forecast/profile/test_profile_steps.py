"""Costs are scaled to whole steps, so that a simulation reproduces the measurement."""

from dataclasses import replace
from statistics import median

import pytest

from interlace.core.types import SampleKey
from interlace.forecast.profile.steps import StepTimes, fit_profile, ratio, relative_change, simulate_steps, waiting_s
from interlace.forecast.profile.types import Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import Span, StepRecord

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
RECIPE = load_recipe("quickstart", ["prompts_per_step=4", "cluster.devices=cpu:2"])
SAMPLES_PER_STEP = 32


def test_a_simulation_of_the_fitted_costs_takes_as_long_as_the_steps_did() -> None:
    real = StepTimes(steps_s=[0.5], rollouts_s=[0.2], trains_s=[0.15])
    found = fit_profile(PROFILE, real, RECIPE, 2)
    said = simulate_steps(found, RECIPE, 2)
    assert median(said.rollouts_s) == pytest.approx(0.2, rel=0.05)
    assert median(said.trains_s) == pytest.approx(0.15, rel=0.05)
    assert said.step_s == pytest.approx(real.step_s, rel=0.05)
    assert found.controller_sample_s > 0


def test_a_step_that_is_no_longer_than_its_parts_leaves_nothing_to_the_controller() -> None:
    said = simulate_steps(PROFILE, RECIPE, 2)
    found = fit_profile(PROFILE, said, RECIPE, 2)
    assert found.controller_sample_s * SAMPLES_PER_STEP < 0.02 * said.step_s
    assert found.rollout.step_s(64) == pytest.approx(PROFILE.rollout.step_s(64), rel=0.02)
    assert found.actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.02)


def test_controller_time_that_overlaps_with_generation_is_charged_to_the_samples() -> None:
    said = simulate_steps(PROFILE, RECIPE, 2)
    real = replace(said, controller_s=0.06, waiting_s=0.01)
    found = fit_profile(PROFILE, real, RECIPE, 2)
    assert RECIPE.schedule.resolved.granularity.reward == "step", "one call scores all samples"
    charged_s = found.controller_step_s + SAMPLES_PER_STEP * found.controller_sample_s + PROFILE.reward.call_s
    assert charged_s == pytest.approx(0.06, rel=0.02)


def test_costs_are_fitted_to_responses_as_long_as_the_real_ones_were() -> None:
    lengths = {SampleKey(gid, index): 24 for gid in range(8 * 4) for index in range(8)}
    like = StepTimes(steps_s=[1.0] * 6, rollouts_s=[0.1] * 6, trains_s=[0.1] * 6, lengths=lengths)
    real = replace(simulate_steps(PROFILE, RECIPE, 2, like), lengths=lengths)
    assert median(real.rollouts_s) > 1.2 * median(simulate_steps(PROFILE, RECIPE, 2).rollouts_s)
    found = fit_profile(PROFILE, real, RECIPE, 2)
    assert found.rollout.step_s(64) == pytest.approx(PROFILE.rollout.step_s(64), rel=0.001)
    assert found.controller_sample_s * SAMPLES_PER_STEP < 0.01 * real.step_s


def test_what_engines_and_trainer_wait_for_is_found_between_their_calls() -> None:
    bins = {"serve": "generate", "accumulate": "train", "optimizer_step": "train", "update_weights": "weight_sync"}

    def span(operation: str, start_s: float, end_s: float) -> Span:
        where = {"devices": (0,), "group": "a/0", "rank": 0, "cause": "", "step": 1, "version": 0}
        return Span(start_s=start_s, end_s=end_s, operation=operation, bin=bins[operation], **where)

    spans = [
        span("serve", 9.0, 9.9),  # the step's before
        span("serve", 10.5, 12.0),
        span("accumulate", 11.0, 11.5),  # while samples still come: what follows waits for them
        span("accumulate", 13.0, 14.0),
        span("optimizer_step", 14.25, 15.0),
        span("update_weights", 15.5, 16.0),
    ]
    step = StepRecord(step=1, start_s=10.0, end_s=16.5, counts={})
    assert waiting_s(step, spans) == pytest.approx(0.5 + 0.25 + 0.5 + 0.5)
    assert waiting_s(step, spans[:2]) == 0.0, "nothing was trained on"


def test_waiting_is_charged_once_a_step_where_the_trainer_has_to_wait() -> None:
    plain = simulate_steps(PROFILE, RECIPE, 2)
    found = simulate_steps(PROFILE.model_copy(update={"controller_step_s": 0.25}), RECIPE, 2)
    assert found.step_s - plain.step_s == pytest.approx(0.25, rel=0.01)
    assert found.trains_s == pytest.approx(plain.trains_s)


def test_the_noise_of_steps_is_what_their_lengths_do_not_explain() -> None:
    said = simulate_steps(PROFILE, RECIPE, 2)
    assert (
        fit_profile(
            PROFILE, StepTimes(steps_s=[0.5] * 8, rollouts_s=[0.2] * 8, trains_s=[0.15] * 8), RECIPE, 2
        ).step_noise
        == 0.0
    )
    shaken = [step_s * factor for step_s, factor in zip(said.steps_s, [0.9, 1.1] * 8, strict=False)]
    real = StepTimes(steps_s=shaken, rollouts_s=said.rollouts_s, trains_s=said.trains_s)
    assert fit_profile(PROFILE, real, RECIPE, 2).step_noise > 0.1


def test_the_change_between_two_runs_counts_common_steps() -> None:
    before = StepTimes(steps_s=[1.0, 2.0, 3.0], rollouts_s=[0.1] * 3, trains_s=[0.1] * 3)
    after = StepTimes(steps_s=[1.1, 2.2], rollouts_s=[0.1] * 2, trains_s=[0.1] * 2)
    assert relative_change(before, after) == pytest.approx(0.0953, abs=1e-3)
    assert relative_change(after, before) == pytest.approx(-relative_change(before, after))


def test_an_algorithm_that_trains_on_its_replay_alone_keeps_the_costs_of_training() -> None:
    """The steps of `dagger` and `bc` have no on-policy update: their ratio was a division by 0."""
    nothing = StepTimes(steps_s=[0.5, 0.5], rollouts_s=[0.2, 0.2], trains_s=[0.0, 0.0])
    assert ratio(nothing, nothing.trains_s, nothing.trains_s) == 1.0
    known = replace(nothing, lengths={SampleKey(0, 0): 4})
    assert ratio(known, known.trains_s, known.trains_s) == 1.0
