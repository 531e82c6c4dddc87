"""Markets of devices: the closed form of a run's interruptions, and a simulation with the same rates."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.random import keyed_random
from interlace.forecast.chaos import simulate_faults
from interlace.forecast.costs.markets import DAY_S, Market, load_market, market_names
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import Interruptions, expect_interruptions
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.chaos.faults import FaultSpec
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe

NODES = Market(name="test", interruptions_per_node_day=24.0, node_devices=8, restart_s=100.0)


def recipe_of(*overrides: str) -> Recipe:
    sizes = ("prompts_per_step=8", "samples_per_prompt=4", "steps=40", "minibatches=1", "checkpoint_every=4")
    return load_recipe("quickstart", [*sizes, *overrides])


def simulation_of(num_devices: int) -> Simulation:
    return Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=num_devices, num_prompts=1024)


def expected(recipe: Recipe, num_devices: int, step_s: float, market: Market = NODES) -> Interruptions:
    devices = simulation_of(num_devices).devices
    return expect_interruptions(market, recipe, recipe.schedule.resolved, devices, step_s)


def test_a_trainer_costs_its_start_and_half_of_the_steps_between_checkpoints() -> None:
    found = expected(recipe_of("schedule=verl-colocated"), 32, 10.0)
    assert (found.per_day, found.restarts_per_day) == (96, 96)
    assert found.restart_loss_s == 100 + 4 * 10 / 2
    assert found.effective_time == pytest.approx(1 / (1 + 96 * 120 / DAY_S))
    rare = expected(recipe_of("schedule=verl-colocated", "checkpoint_every=0"), 32, 10.0)
    assert rare.restart_loss_s == 100 + 40 * 10 / 2, "half of the run"


def test_engines_on_other_nodes_cost_their_part_of_generation() -> None:
    found = expected(recipe_of("schedule=areal"), 32, 10.0)
    assert (found.per_day, found.restarts_per_day) == (96, 24), "a quarter of the devices trains"
    regenerated_s = (1 + 4) * 10 / 2  # five steps of samples are in flight
    assert found.effective_time == pytest.approx(1 / (1 + 24 / DAY_S * (120 + 100 + regenerated_s)))


@pytest.mark.parametrize("schedule", ["verl-colocated", "areal"])
def test_a_simulation_with_the_same_rates_confirms_the_share(schedule: str) -> None:
    """Each device is a node, all with a part of the trainer, or six with engines and two with the trainer."""
    recipe = recipe_of(f"schedule={schedule}", "sampling.max_new_tokens=2048")
    profile = load_profile("qwen2.5-7b-h20")
    actor = profile.actor.model_copy(update={"token_s": profile.actor.token_s / 20})  # generation limits the step
    simulation = Simulation(profile=profile.model_copy(update={"actor": actor}), num_devices=8, num_prompts=1024)
    calm = simulate(recipe, simulation)
    step_s, num_faults = calm.seconds / recipe.steps, 4
    rate = num_faults * DAY_S / calm.seconds
    market = Market(name="test", interruptions_per_node_day=rate, node_devices=1, restart_s=2 * step_s)
    num_trainers = 8 if schedule == "verl-colocated" else 2
    faults: list[FaultSpec] = []
    for node in range(8):
        role, draw = ("actor" if node < num_trainers else "rollout"), keyed_random("interruptions", schedule, node)
        for number in range(num_faults):  # one at random in each part of the run
            at_s = (number + draw.random()) * calm.seconds / num_faults
            faults.append(FaultSpec(text=f"kill:{role}@{at_s:.9f}s", kind="kill", role=role, at_s=at_s))  # type: ignore[arg-type]
    found = simulate_faults(recipe, faults, simulation, restart_s=market.restart_s)
    assert found.is_complete and found.lost == found.duplicated == 0
    share = expected(recipe, 8, step_s, market).effective_time
    assert found.effective_time == pytest.approx(share, abs=0.05)


def test_every_shipped_market_can_be_read_and_others_are_files(tmp_path: Path) -> None:
    rates = [load_market(name).interruptions_per_node_day for name in market_names()]
    assert market_names() == ["on-demand", "spot"] and rates == sorted(rates)
    own = tmp_path / "mine.yaml"
    own.write_text("{name: mine, interruptions_per_node_day: 2, node_devices: 4, restart_s: 60}")
    assert load_market(str(own)).node_devices == 4
    with pytest.raises(UserError, match=r"unknown market 'spott'.*Did you mean 'spot'"):
        load_market("spott")
    own.write_text("{name: mine, node_devices: 4, restart_s: 60}")
    with pytest.raises(UserError, match="interruptions_per_node_day"):
        load_market(str(own))
