"""A profile from a run's records gives a simulation with the duration of the run."""

import json
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.forecast.profile.from_run import profile_of_run
from interlace.forecast.profile.types import Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.forecast.simulate import Simulation, simulate, simulate_into
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.load import load_recipe

PROFILE = Profile(
    device="a test's",
    device_memory_bytes=2**33,
    rollout=RolloutCosts(
        steps=((1, 0.004), (64, 0.02)), call_s=0.002, prefill_token_s=2e-5, kv_tokens=16384, update_s=0.03
    ),
    actor=TrainCosts(token_s=2e-4, optimizer_s=0.05, export_s=0.01),
    reward=RewardCosts(median_s=0.01, workers=4),
    lengths=Lengths(prompt_tokens=8, median=20),
)


def recorded(root: Path, steps: int, profile: Profile = PROFILE, *overrides: str) -> RunFolder:
    settings = (f"steps={steps}", "prompts_per_step=8", "samples_per_prompt=4", "cluster.devices=cpu:2", *overrides)
    simulate_into("quickstart", settings, "verl-colocated", root, Simulation(profile=profile, num_devices=2))
    [path] = root.iterdir()
    return RunFolder(path=path)


def test_a_simulation_of_the_profile_takes_as_long_as_the_run_did(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 10)
    recipe, found = profile_of_run(folder)
    run = RunData.read(folder)
    again = simulate(load_recipe(str(folder.config)), Simulation(profile=found, num_devices=2)).run
    for metric in ("timing_s/step", "timing_s/rollout", "timing_s/train"):
        assert sum(again.values(metric)[2:]) == pytest.approx(sum(run.values(metric)[2:]), rel=0.1), metric
    assert recipe.model.path == found.model
    assert found.rollout.update_s == pytest.approx(0.03)
    assert found.rollout.step_s(32) == pytest.approx(PROFILE.rollout.step_s(32), rel=0.05)
    assert found.rollout.prefill_token_s == pytest.approx(PROFILE.rollout.prefill_token_s, rel=0.05)
    assert found.actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.05)
    assert found.lengths.quantiles[16] == pytest.approx(20, rel=0.2)
    assert found.lengths.prompt_tokens == pytest.approx(8, abs=1)


def test_the_cost_of_cached_tokens_does_not_depend_on_the_setting_of_the_cache(tmp_path: Path) -> None:
    reading = PROFILE.rollout.model_copy(update={"context_token_s": 5e-6})
    profile = PROFILE.model_copy(update={"rollout": reading})
    found = profile_of_run(recorded(tmp_path, 10, profile, "rollout.max_tokens=auto"))[1].rollout
    assert found.context_token_s == pytest.approx(reading.context_token_s, rel=0.2)
    assert found.kv_tokens == pytest.approx(reading.kv_tokens, rel=0.1)


@pytest.mark.parametrize("size", ["auto", 16384])
def test_the_cache_of_an_engine_on_two_devices_is_counted_once(tmp_path: Path, size: str | int) -> None:
    settings = (f"rollout.max_tokens={size}", "schedule.placement.rollout.devices_per_instance=2")
    kv = 8192 if size == "auto" else 16384
    rollout = PROFILE.rollout.model_copy(update={"kv_tokens": kv, "engine_kv_tokens": 0 if size == "auto" else kv})
    profile = PROFILE.model_copy(update={"rollout": rollout})
    recipe, found = profile_of_run(recorded(tmp_path, 6, profile, *settings))
    assert found.rollout.cache_tokens(1) == pytest.approx(kv, rel=0.1), "of a fixed size also on one device"
    assert found.rollout.cache_tokens(2) == pytest.approx(16384, rel=0.1)
    token_bytes = model_size(empty_model(recipe.model)).kv_bytes_per_token
    assert found.rollout.device_bytes == pytest.approx(8192 * token_bytes, rel=0.1)


def test_tokens_of_filtered_groups_are_neither_trained_nor_prompts(tmp_path: Path) -> None:
    """In a run that filters most groups the prompts counted ten times as long, and a trained token cost a fifth."""
    profile = PROFILE.model_copy(update={"reward": RewardCosts(median_s=0.01, solve_rate=0.5, solve_spread=0.8)})
    verdicts = ("reward.correct=1", "reward.incorrect=0")
    folder = recorded(
        tmp_path, 5, profile, "algorithm=dapo", "prompts_per_step=8", "samples_per_prompt=2", "minibatches=1", *verdicts
    )
    found = profile_of_run(folder)[1]
    assert sum(RunData.read(folder).values("samples/filtered")) > 80
    assert found.lengths.prompt_tokens == pytest.approx(8, abs=1)
    assert found.actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.1)


def test_a_token_that_is_trained_twice_costs_two_trainings(tmp_path: Path) -> None:
    actor = profile_of_run(recorded(tmp_path, 10, PROFILE, "epochs=2"))[1].actor
    assert actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.1)
    assert actor.optimizer_s == pytest.approx(PROFILE.actor.optimizer_s, rel=0.1)


def test_a_step_whose_samples_all_failed_does_not_end_the_fit(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 10)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    rows[4] = {name: value for name, value in rows[4].items() if not name.startswith("response_length/")}
    nothing = {"samples/trained": 0, "perf/num_tokens": 0, "goodput/trained_tokens_per_device_s": 0.0}
    rows[4] |= {**nothing, "samples/failed": rows[3]["samples/trained"]}
    folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = profile_of_run(folder)[1]
    assert found.lengths.prompt_tokens == pytest.approx(8, abs=1)
    assert found.actor.token_s == pytest.approx(PROFILE.actor.token_s, rel=0.1)


def test_a_right_sample_with_a_penalty_for_its_form_is_right(tmp_path: Path) -> None:
    shaped = ("reward.correct=1", "reward.incorrect=0", "reward.shaping={length_weight: 0.4}")
    found = profile_of_run(recorded(tmp_path, 5, PROFILE, *shaped))[1].reward
    assert found.solve_rate == pytest.approx(PROFILE.reward.solve_rate, abs=0.07)  # half of the right ones lose reward


def test_a_run_of_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="logged 3 steps; a profile is fitted to 5 or more"):
        profile_of_run(recorded(tmp_path, 3))
