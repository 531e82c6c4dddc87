"""Recipes that train on given rows run on the virtual clock: the time is that of their passes, and repeats exactly."""

import pytest

from interlace.forecast.simulate import Simulated, Simulation, check_simulated, simulate
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from tests.unit.forecast.test_simulate import PROFILE as SMALL_DEVICES

STEPS, ROWS = 3, 8
PROFILE = SMALL_DEVICES.model_copy(update={"device_memory_bytes": 1000})


def recipe_of(name: str, *overrides: str) -> Recipe:
    sizes = (f"steps={STEPS}", f"prompts_per_step={ROWS}", "sampling.max_new_tokens=400")
    return load_recipe(name, [*sizes, *overrides])


def simulated(name: str, *overrides: str, num_devices: int = 1) -> Simulated:
    recipe, simulation = recipe_of(name, *overrides), Simulation(profile=PROFILE, num_devices=num_devices)
    check_simulated({"one": recipe}, simulation.profile, simulation.devices)
    return simulate(recipe, simulation)


def test_a_step_takes_the_time_of_its_tokens_and_its_optimizer() -> None:
    result = simulated("sft")
    assert len(result.results) == STEPS and not result.events
    for step in result.run.rows:
        expected = step["perf/num_tokens"] * PROFILE.actor.token_s + PROFILE.actor.optimizer_s
        assert step["goodput/train"] * step["timing_s/step"] == pytest.approx(expected, rel=1e-6)
        assert step["perf/num_tokens"] > ROWS * PROFILE.lengths.prompt_tokens
    again = simulated("sft")
    assert again.seconds == result.seconds and again.run.rows == result.run.rows


def test_the_reference_of_a_loss_takes_time_and_a_pair_has_two_completions() -> None:
    inference = {
        loss: simulated("dpo", f"algorithm.loss={loss}").ledger.fraction("inference")
        for loss in ("orpo", "sigmoid", "kto")
    }
    assert inference["orpo"] == 0 < inference["sigmoid"] < inference["kto"], "kto needs a reference point as well"
    one, two = (simulated(name).run.values("perf/num_tokens")[0] for name in ("sft", "reward-model"))
    assert two > one


def test_more_devices_take_less_time() -> None:
    assert simulated("sft", num_devices=4).seconds < simulated("sft").seconds
