"""A simulated sample costs as much on many devices, and a model of a cluster keeps the time of its controller."""

import cProfile
import pstats

import pytest

from interlace.forecast.costs.profiles import change_profile, load_profile
from interlace.forecast.costs.scale import scale_model, thin_limits, thin_samples
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe
from interlace.schedule.schedule import Migrate, Schedule

GROWTH = 1.1
"""Of Python calls a sample, from 16 to 128 devices, that is let pass."""


def calls_a_sample(preset: str, num_devices: int) -> float:
    """As many prompts as devices, so that each has as much to do."""
    settings = [f"schedule={preset}", f"prompts_per_step={num_devices}", "samples_per_prompt=16", "steps=2"]
    recipe = load_recipe("quickstart", [*settings, "sampling.max_new_tokens=28672"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=num_devices, num_prompts=512)
    profile = cProfile.Profile()
    simulated = profile.runcall(simulate, recipe, simulation)
    return pstats.Stats(profile).total_calls / len(simulated.events)


@pytest.mark.parametrize("preset", ["rlinf-hybrid", "rollpacker", "areal"])
def test_a_sample_costs_as_much_among_many_devices(preset: str) -> None:
    assert calls_a_sample(preset, 128) < GROWTH * calls_a_sample(preset, 16)


def test_a_scale_model_keeps_the_time_of_the_controller() -> None:
    profile = change_profile(load_profile("qwen2.5-7b-h800"), ["reward.call_s=0.001"])
    for granule, longer in (("sample", 8), ("group", 8), ("step", 1), ("25%", 1)):
        assert scale_model(profile, 8, 256, granule).reward.call_s == pytest.approx(0.001 * longer), granule


def test_a_fourth_of_the_samples_costs_four_times_as_much_each() -> None:
    """A short search of a step of 8,192 samples scored nine schedules."""
    profile = load_profile("qwen2.5-7b-h800")
    thin = thin_samples(profile, 4)
    for batch in (1, 8, 64):
        assert thin.rollout.step_s(batch) == pytest.approx(profile.rollout.step_s(4 * batch), rel=0.05)
    assert thin.actor.token_s == 4 * profile.actor.token_s
    assert thin.rollout.kv_tokens == profile.rollout.kv_tokens // 4


@pytest.mark.parametrize("workers", [1, 5, 64])
def test_scorers_of_fewer_samples_take_as_long_for_a_step(workers: int) -> None:
    """A single scorer took a fourth of the time."""
    changes = [f"reward.workers={workers}", "reward.median_s=0.1"]
    thin = thin_samples(change_profile(load_profile("qwen2.5-7b-h800"), changes), 4).reward
    assert thin.median_s / 4 / thin.workers == pytest.approx(0.1 / workers)


def test_calls_of_the_reward_take_as_long_with_fewer_samples() -> None:
    """A call for a whole step took four times as long."""
    profile = change_profile(load_profile("qwen2.5-7b-h800"), ["reward.call_s=0.001"])
    for granule, longer in (("sample", 4), ("group", 4), ("step", 1), ("25%", 1), (64, 1), (2, 2)):
        assert thin_samples(profile, 4, granule).reward.call_s == pytest.approx(0.001 * longer), granule


def test_fixed_numbers_of_samples_are_divided() -> None:
    """Engines to which sequences migrate had four times as many as in the whole step."""
    schedule = Schedule.parse({"concurrency": 64, "tail": "migrate", "granularity": {"reference": 32}})
    thin = thin_limits(schedule, 4)
    assert isinstance(thin.tail, Migrate)
    assert (thin.concurrency, thin.tail.batch, thin.granularity.of("reference")) == (16, 12, 8)
    assert thin_limits(schedule, 1) is schedule
    assert thin_limits(Schedule(), 4) == Schedule()
