"""A recipe under faults on the virtual clock: nothing is lost, nothing counts twice, and the bound holds."""

from dataclasses import replace

import pytest

from interlace.core.errors import UserError
from interlace.forecast.chaos import simulate_faults
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation
from interlace.run.chaos.certificate import EndedKey, SampleCounts
from interlace.run.chaos.faults import check_processes, parse_faults
from interlace.run.recipe.load import load_recipe

SMALL = ("steps=3", "prompts_per_step=4", "samples_per_prompt=3", "minibatches=1")


@pytest.mark.parametrize("schedule", ["verl-colocated", "areal"])
def test_a_recipe_under_faults_keeps_every_promise(schedule: str) -> None:
    recipe = load_recipe("quickstart", [*SMALL, f"schedule={schedule}"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    faults = parse_faults("kill:rollout@1/step,stop:rollout@1s,kill:reward@1/step")
    found = simulate_faults(recipe, faults, simulation, restart_s=10.0)
    assert found.holds and found.survived == found.injected >= 1
    assert 0 < found.effective_time <= 1
    assert found.weights_equal is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no fault"),
        ("kill:rollout", "is not a fault"),
        ("crash:rollout@1s", "unknown kind 'crash'"),
        ("kill:rolout@1s", "unknown role 'rolout'.*Did you mean 'rollout'"),
        ("kill:world_model@1s", "'world_model' has no process"),
        ("kill:rollout@often", "has the rate 'often'"),
        ("kill:rollout@2/step", "above 0 and at most 1"),
        ("kill:rollout@1s,kill:rollout@1s", "twice"),
        ("kill:rollout@0.1/updat", "unknown phase 'updat'.*Did you mean 'update'"),
        ("kill:rollout@2/update", "above 0 and at most 1"),
    ],
)
def test_a_bad_specification_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_faults(text)


@pytest.mark.parametrize(
    ("overrides", "fault", "message"),
    [
        ((), "kill:rollout@1s", "Set rollout=interlace"),
        ((), "kill:reward@1s", "Set reward.workers=1"),
        ((), "kill:episode@1s", "episode.workers=1"),
        ((), "stop:env@1s", "no environments"),
        (("cluster.backend=ray", "cluster.address=auto"), "kill:reward@1s", "that the command starts"),
        ((), "kill:reference@1s", "has no reference"),
        (("algorithm.kl_coefficient=0.1",), "kill:reference@1s", "Set cluster.backend=ray"),
    ],
)
def test_a_fault_without_a_process_is_refused(overrides: tuple[str, ...], fault: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_processes(load_recipe("quickstart", overrides), parse_faults(fault))


def test_a_run_without_a_fault_or_a_trained_sample_proves_nothing() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "schedule=verl-colocated"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    found = simulate_faults(recipe, parse_faults("kill:reward@0.000001/step"), simulation, restart_s=10.0)
    assert found.missing == ("no fault was injected",)
    assert not found.holds and not found.is_broken and found.samples_equal
    untrained = replace(found, events={"filtered": 88})
    assert untrained.row()["missing"] == ["no fault was injected", "no sample was trained"]


def test_samples_are_counted_by_their_keys() -> None:
    ended = [EndedKey(0, 0, "trained"), EndedKey(0, 1, "failed"), EndedKey(2, 0, "trained"), EndedKey(2, 0, "trained")]
    counts = SampleCounts.of(ended, 2)
    assert (counts.lost, counts.duplicated) == (3, 1)
    assert counts.events == {"failed": 1, "trained": 3}


def test_a_fault_of_a_trainer_costs_its_start_and_the_steps_since_the_checkpoint() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "steps=6", "checkpoint_every=2", "schedule=verl-colocated"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    calm = simulate_faults(recipe, parse_faults("kill:actor@0s"), simulation, restart_s=0.0)
    assert calm.step_s == pytest.approx(calm.step_s_without_faults)
    end_s = calm.step_s_without_faults
    late = simulate_faults(recipe, parse_faults(f"kill:actor@{end_s * 0.999:.9f}s"), simulation, restart_s=10.0)
    repeated_s = late.step_s - late.step_s_without_faults - 10.0
    assert late.holds and late.injected == 1
    assert end_s * 0.2 < repeated_s < end_s * 0.5  # the last two of six steps


def test_a_fault_of_a_trainer_after_the_end_is_not_injected() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "steps=2", "schedule=verl-colocated"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    found = simulate_faults(recipe, parse_faults("kill:actor@99999s"), simulation, restart_s=10.0)
    assert found.missing == ("no fault was injected",)
    assert found.step_s == pytest.approx(found.step_s_without_faults)


def test_a_fault_of_a_phase_is_refused_on_the_virtual_clock() -> None:
    recipe = load_recipe("quickstart", SMALL)
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=8, num_prompts=64)
    with pytest.raises(UserError, match="kill:rollout@1/update: faults of a phase are not simulated"):
        simulate_faults(recipe, parse_faults("kill:rollout@1/update"), simulation, restart_s=10.0)
