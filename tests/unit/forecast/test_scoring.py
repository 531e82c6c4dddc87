"""Scores and bounds of schedules are of the whole cluster and of the roles that a profile has."""

import pytest

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest
from interlace.forecast.scoring import TimedEffort, Workplace, open_scorer
from interlace.forecast.search.bounds import estimate_step, memory_by_part
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule


def test_a_reward_model_is_not_counted_as_a_second_trainer() -> None:
    sizes, schedule = ["prompts_per_step=64", "samples_per_prompt=4"], load_schedule("verl-colocated")
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    found = {}
    for reward in ("reward=exact", "reward={name: model, model: tiny:micro}"):
        request = PlanRequest(recipe=load_recipe("quickstart", [*sizes, reward]), simulation=simulation)
        place = (schedule, simulation.profile, request.workload, simulation.devices)
        found["reward" in request.workload.roles] = estimate_step(*place), memory_by_part(*place)
    assert found[True] == found[False]


@pytest.mark.parametrize(
    ("recipe", "profile", "fidelity"),
    [
        ("quickstart", "qwen2.5-7b-h20", {"scale": 4}),
        ("quickstart", "qwen2.5-7b-h20", {"thin": 2}),
        ("robot", "rlinf-maniskill", {"turns": 8}),
    ],
)
def test_a_model_of_a_cluster_trains_as_many_tokens_per_second(recipe: str, profile: str, fidelity) -> None:
    """Plans that were simulated on models of the cluster are ranked beside plans of the whole cluster."""
    sizes = ["prompts_per_step=64", "samples_per_prompt=2", "sampling.max_new_tokens=1000", "minibatches=1"]
    environments = ["episode.env.num_envs=16"] if recipe == "robot" else []
    simulation = Simulation(profile=load_profile(profile), num_devices=32, num_prompts=64)
    place = Workplace(recipe=load_recipe(recipe, [*sizes, *environments]), simulation=simulation)
    schedule = Candidate.of(load_schedule("verl-colocated"))
    small = place.score(schedule.on(32 // fidelity.get("scale", 1)), Fidelity(steps=1, **fidelity))
    whole = place.score(schedule.on(32), Fidelity(steps=1))
    assert isinstance(small, Score) and isinstance(whole, Score)
    assert small.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.1)


def test_the_planner_gets_the_score_of_a_model_of_the_cluster_as_it_is() -> None:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=16, num_prompts=64)
    place = Workplace(recipe=load_recipe("quickstart", ["prompts_per_step=32", "minibatches=1"]), simulation=simulation)
    schedule, fidelity = load_schedule("verl-colocated"), Fidelity(steps=1, scale=2)
    with open_scorer(place, processes=1, effort=TimedEffort(600, processes=1)) as score:
        assert score([(schedule, fidelity)]) == [place.score(schedule, fidelity)]


def test_the_steps_that_fill_a_pipeline_are_a_cost_of_a_restart() -> None:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    place = Workplace(recipe=load_recipe("quickstart", ["prompts_per_step=32", "minibatches=1"]), simulation=simulation)
    for preset, fills in (("verl-colocated", False), ("one-step-off", True)):
        score = place.score(load_schedule(preset), Fidelity(steps=2))
        assert isinstance(score, Score) and (score.fill_s > 0) is fills


def test_a_simulation_of_a_slow_schedule_ends_early() -> None:
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    place = Workplace(recipe=load_recipe("quickstart", ["prompts_per_step=32", "minibatches=1"]), simulation=simulation)
    schedule = load_schedule("verl-colocated")
    whole = place.score(schedule, Fidelity(steps=4))
    assert isinstance(whole, Score) and whole.num_steps == 4
    for most_s, num_steps in ((whole.step_s / 2, 1), (2 * whole.step_s, 4)):
        score = place.score(schedule, Fidelity(steps=4, most_step_s=most_s))
        assert isinstance(score, Score) and score.num_steps == num_steps
