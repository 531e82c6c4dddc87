"""A simulated sample costs as much on many devices, and a model of a cluster keeps the time of its controller."""

import cProfile
import pstats

import pytest

from interlace.forecast.costs.profiles import change_profile, load_profile
from interlace.forecast.costs.scale import scale_model, thin_limits, thin_samples
from interlace.forecast.links import Link, Links
from interlace.forecast.profile.types import EnvCosts
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
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
        schedule = Schedule.parse({"granularity": {"reward": granule}})
        assert scale_model(profile, 8, 256, schedule).reward.call_s == pytest.approx(0.001 * longer), granule


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
    """A single scorer took a fourth of the time, in a model of the cluster too."""
    changes = [f"reward.workers={workers}", "reward.median_s=0.1"]
    profile = change_profile(load_profile("qwen2.5-7b-h800"), changes)
    for fewer in (thin_samples(profile, 4).reward, scale_model(profile, 4, 256).reward):
        assert fewer.median_s / 4 / fewer.workers == pytest.approx(0.1 / workers)


@pytest.mark.parametrize("processes", [1, 6, 64])
def test_simulators_on_the_host_take_as_long_in_a_model_of_the_cluster(processes: int) -> None:
    """A single process simulated an eighth of the episodes, as if the host had eight."""
    env = EnvCosts(chunks=((1, 0.1), (8, 0.4)), reset_s=1.0, host_processes=processes)
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"env": env})
    small = scale_model(profile, 8, 256).env
    assert small is not None
    assert small.chunk_s(1) / 8 / small.host_processes == pytest.approx(0.1 / processes)
    assert small.reset_s / 8 / small.host_processes == pytest.approx(1.0 / processes)
    on_devices = scale_model(profile, 8, 256, Schedule.parse({"placement": {"env": "all"}})).env
    assert on_devices is not None and on_devices.chunks == env.chunks


def test_a_link_has_as_much_work_with_fewer_samples() -> None:
    """A fourth of the samples crossed the links in a fourth of the time."""
    links = Links(in_node=Link(bytes_per_s=1e9), between_nodes=Link(bytes_per_s=1e6))
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"links": links})
    thin = thin_samples(profile, 4).links
    assert thin is not None
    (_, thin_s), (_, whole_s) = (each.samples_s(["sim:0"], ["sim:8"]) for each in (thin, links))
    assert thin_s == pytest.approx(4 * whole_s)


def test_models_have_as_many_calls_with_fewer_samples() -> None:
    """If calls took four times as long, the steps would take 5 % longer: each call has all samples that are ready."""
    settings = ["prompts_per_step=64", "samples_per_prompt=8", "sampling.max_new_tokens=2048"]
    profile = change_profile(load_profile("qwen2.5-7b-h800"), ["actor.call_s=0.5"])
    place = Workplace(recipe=load_recipe("quickstart", settings), simulation=Simulation(profile=profile, num_devices=8))
    schedule = load_schedule("rlinf-disaggregated")
    granules = schedule.granularity.model_copy(update={"actor": "group"})
    schedule = schedule.model_copy(update={"granularity": granules})
    whole, thin = (place.score(schedule, Fidelity(steps=4, thin=thin)) for thin in (1, 4))
    assert isinstance(whole, Score) and isinstance(thin, Score)
    assert thin.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.02)


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
