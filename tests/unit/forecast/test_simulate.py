"""A recipe runs on the virtual clock with every preset, is reproducible to the byte, and reacts to faults."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.core.errors import HangError, InterlaceError, UserError, WorkerDiedError
from interlace.core.types import TerminalEvent
from interlace.forecast.profile.types import InferenceCosts, Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.forecast.simulate import Simulated, Simulation, simulate
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.runtime.sim.cluster import Fault
from interlace.schedule.presets import preset_names

PROFILE = Profile(
    device="a test's",
    device_memory_bytes=100,
    rollout=RolloutCosts(
        steps=((1, 0.01), (64, 0.02)), context_token_s=1e-7, prefill_token_s=1e-5, kv_tokens=4000, update_s=0.1,
        state_bytes=20, device_bytes=30, onload_s=0.1, offload_s=0.1,
    ),
    actor=TrainCosts(token_s=1e-3, optimizer_s=0.2, export_s=0.1, state_bytes=120, onload_s=0.2, offload_s=0.2),
    reference=InferenceCosts(token_s=2e-4, state_bytes=20),
    reward=RewardCosts(median_s=0.05, sigma=0.8, workers=8),
    lengths=Lengths(prompt_tokens=20, median=60, cap_share=0.02),
)  # fmt: skip


def recipe_of(schedule: str, *overrides: str) -> Recipe:
    sizes = ("prompts_per_step=8", "samples_per_prompt=4", "steps=4", "sampling.max_new_tokens=400")
    return load_recipe("quickstart", [f"schedule={schedule}", *sizes, *overrides])


def simulated(schedule: str, *overrides: str, faults: tuple[Fault, ...] = ()) -> Simulated:
    simulation = Simulation(profile=PROFILE, num_devices=8, num_prompts=256, faults=faults)
    return simulate(recipe_of(schedule, *overrides), simulation)


def assert_sound(result: Simulated, recipe: Recipe) -> None:
    ends = Counter(ended.sample.key for ended in result.events)
    assert set(ends.values()) == {1}, "a sample ended twice"
    events = Counter(ended.event for ended in result.events)
    assert events[TerminalEvent.TRAINED] == 4 * 8 * 4
    assert max(result.run.values("sched/staleness_max")) <= recipe.schedule.resolved.staleness_bound
    assert result.ledger.total_s == pytest.approx(8 * result.seconds, rel=1e-3)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_trains_every_step_and_accounts_for_every_device_second(preset: str) -> None:
    assert_sound(simulated(preset), recipe_of(preset))


def test_a_schedule_for_robots_serves_text_on_fewer_devices_than_its_simulators_need() -> None:
    """A quarter of two devices for simulators is none, and there are none here, whatever else looks for shared ones."""
    recipe = recipe_of("embodied-async", "schedule.tail={kind: migrate}")
    roomy = PROFILE.model_copy(update={"device_memory_bytes": 1000})
    ended = simulate(recipe, Simulation(profile=roomy, num_devices=2, num_prompts=256)).events
    assert Counter(each.event for each in ended)[TerminalEvent.TRAINED] == 4 * 8 * 4


def test_synchronous_presets_train_on_the_same_samples() -> None:
    def lengths(preset: str) -> list[tuple[int, int, int]]:
        ended = simulated(preset).events
        return sorted((e.sample.key.gid, e.sample.key.index, e.sample.num_tokens) for e in ended)

    names = ("verl-colocated", "rlinf-disaggregated", "streamrl-sync", "rlhfuse")
    assert len({tuple(lengths(name)) for name in names}) == 1


def test_dynamic_sampling_and_failures_are_simulated_too() -> None:
    profile = PROFILE.model_copy(update={"reward": RewardCosts(solve_spread=0.9, fail_share=0.2)})
    recipe = recipe_of("streamrl-async", "algorithm.drop_zero_variance=true")
    result = simulate(recipe, Simulation(profile=profile, num_devices=8))
    events = Counter(ended.event for ended in result.events)
    assert events[TerminalEvent.FILTERED] > 0 and events[TerminalEvent.FAILED] > 0


def test_a_reward_model_takes_its_devices() -> None:
    of_function, of_model = (
        simulate(recipe_of("verl-colocated", reward), Simulation(profile=PROFILE, num_devices=8)).ledger.seconds[
            "score"
        ]
        for reward in ("reward=exact", "reward={name: model, model: tiny:micro}")
    )
    assert of_function == 0 < of_model


@pytest.mark.parametrize("engine", ["vllm", "sglang", "interlace"])
def test_engines_that_are_servers_are_simulated_without_their_model(engine: str) -> None:
    changes = (f"rollout={engine}", "rollout.heartbeat_s=0.1", "model.path=nobody/no-model", "steps=2")
    seconds = {
        name: simulate(recipe_of("verl-colocated", *settings), Simulation(profile=PROFILE, num_devices=8)).seconds
        for name, settings in (("native", ("steps=2",)), (engine, changes))
    }
    assert seconds[engine] == seconds["native"]


def test_a_worker_that_does_not_fit_is_refused() -> None:
    profile = PROFILE.model_copy(update={"device_memory_bytes": 40})
    with pytest.raises(UserError, match="rollout/0 needs"):
        simulate(recipe_of("verl-colocated"), Simulation(profile=profile, num_devices=8))


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(PROFILE.model_dump_json())

    def bytes_of(hash_seed: str) -> tuple[bytes, bytes]:
        timeline = tmp_path / f"timeline-{hash_seed}.json"
        arguments = [
            "simulate", "quickstart", "prompts_per_step=4", "samples_per_prompt=4", "steps=3", "--devices", "8",
            "--schedule", "areal,rollpacker", "--profile", str(costs), "--timeline", str(timeline), "--json",
        ]  # fmt: skip
        code = f"import sys; sys.argv[1:] = {arguments!r}; from interlace.cli.main import app; app()"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
        return done.stdout, timeline.read_bytes()

    first, second = bytes_of("1"), bytes_of("2")
    assert first == second
    printed = json.loads(first[0])
    assert [row["schedule"] for row in printed["schedules"]] == ["areal", "rollpacker"]
    assert sum(printed["schedules"][0]["goodput"].values()) == pytest.approx(1)


def test_the_title_of_a_simulation_names_the_model_of_the_costs_and_is_not_broken() -> None:
    words = ["simulate", "quickstart", "steps=1", "--profile", "rlinf-maniskill", "--devices", "2", "--prompts", "64"]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert found.exit_code == 0, found.output
    title = "quickstart on 2 x H100 SXM, 80 GB (roofline of openvla/openvla-7b, not measured), simulated"
    assert found.output.splitlines()[0] == title


def test_the_death_of_a_worker_ends_the_run_by_name() -> None:
    fault = Fault(group="rollout/2", operation="serve", call=3, kind="death")
    with pytest.raises(WorkerDiedError, match="rollout/2 died while it ran serve"):
        simulated("areal", faults=(fault,))


def test_a_worker_may_die_of_a_message_that_nobody_waits_for() -> None:
    fault = Fault(group="rollout/0", operation="interrupt", kind="death")
    with pytest.raises(WorkerDiedError, match="rollout/0 died while it ran interrupt"):
        simulated("areal", faults=(fault,))


def test_a_lost_message_before_the_flow_began_is_named_by_the_watchdog() -> None:
    fault = Fault(group="rollout/0", operation="update_weights", kind="lost_message")
    with pytest.raises(HangError, match="rollout/0"):
        simulated("areal", faults=(fault,))


def test_a_lost_message_is_named_by_the_watchdog() -> None:
    fault = Fault(group="actor/0", operation="accumulate", call=1, kind="lost_message")
    with pytest.raises(HangError, match="actor/0 runs accumulate"):
        simulated("verl-colocated", faults=(fault,))


def test_so_is_one_that_is_lost_before_the_flow_began() -> None:
    fault = Fault(group="actor/0", operation="export_weights", kind="lost_message")
    with pytest.raises(HangError, match="actor/0 runs export_weights"):
        simulated("verl-colocated", faults=(fault,))


def test_a_stall_costs_its_time_and_nothing_else() -> None:
    fault = Fault(group="rollout/0", operation="serve", call=1, kind="stall", seconds=30)
    usual, late = simulated("verl-colocated"), simulated("verl-colocated", faults=(fault,))
    assert_sound(late, recipe_of("verl-colocated"))
    assert usual.seconds < late.seconds <= usual.seconds + 30 + 1e-6


OPERATIONS = {
    "rollout/0": ("serve", "update_weights", "onload", "interrupt"),
    "rollout/3": ("serve", "update_weights"),
    "reward": ("score",),
    "actor/0": ("accumulate", "optimizer_step", "export_weights", "onload"),
}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(preset_names()),
    st.sampled_from([(group, operation) for group, found in OPERATIONS.items() for operation in found]),
    st.integers(0, 12),
    st.sampled_from(["death", "stall", "lost_message"]),
)
def test_whatever_goes_wrong_the_run_ends_whole_or_says_why(
    preset: str, place: tuple[str, str], call: int, kind: str
) -> None:
    group, operation = place
    fault = Fault(group=group, operation=operation, call=call, kind=kind, seconds=5.0)  # type: ignore[arg-type]
    try:
        result = simulated(preset, faults=(fault,))
    except InterlaceError as error:
        assert kind != "stall" and group in str(error)
    else:
        assert_sound(result, recipe_of(preset))
