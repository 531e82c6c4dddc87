"""Every preset shows its mechanism as shipped: each test counts the events of one mechanism.

The runs are on the virtual clock. `longtail` keeps all of its settings except the schedule and the number of steps;
presets for robots run a robot's recipe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pytest

from interlace.forecast.profile.types import EnvCosts, Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts, Turns
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.observe.run_data import RunData
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import KeepAll, Span
from interlace.schedule.dispatch.skew_aware import SkewAware
from interlace.schedule.presets import load_schedule, preset_names

PROFILE = Profile(
    device="invented",
    device_memory_bytes=1 << 40,
    rollout=RolloutCosts(
        steps=((1, 0.004), (16, 0.012)), kv_tokens=8192, max_running=16, prefill_token_s=2e-5, onload_s=0.01
    ),
    actor=TrainCosts(token_s=2e-5, inference_token_s=5e-6, optimizer_s=0.02, state_bytes=1 << 20, onload_s=0.01),
    reward=RewardCosts(median_s=0.001),
    # As `longtail` has them: the longest responses are more than eight times the median.
    lengths=Lengths(prompt_tokens=20, median=36, prompt_sigma=0.6, response_sigma=0.5, rank_correlation=0.9),
)
# The state of an engine and the state of the trainer do not fit one device together.
TIGHT = PROFILE.model_copy(
    update={
        "device_memory_bytes": 3 << 19,
        "rollout": PROFILE.rollout.model_copy(update={"state_bytes": 1 << 20}),
        "actor": PROFILE.actor.model_copy(update={"state_bytes": 4 << 20}),
    }
)
ROBOT_PROFILE = PROFILE.model_copy(
    update={
        "env": EnvCosts(chunks=((1, 0.02), (64, 0.08)), reset_s=0.01, onload_s=0.01),
        "turns": Turns(turns=(8.0,), given_tokens=(20.0,), tool_s=(0.0,)),
        "lengths": Lengths(prompt_tokens=10, median=16, prompt_sigma=0.0, response_sigma=0.0),
    }
)


@dataclass(frozen=True)
class Observed:
    """A run and its spans."""

    run: RunData
    spans: Sequence[Span]

    def last(self, metric: str) -> float:
        return self.run.values(metric)[-1]

    def total(self, metric: str) -> float:
        return sum(self.run.values(metric))

    def of(self, role: str, *operations: str) -> list[Span]:
        return [each for each in self.spans if each.role == role and each.operation in operations]

    def overlaps(self, ones: Sequence[Span], others: Sequence[Span]) -> int:
        """Counts the spans during which one of the others runs, on other devices."""
        return sum(
            any(one.start_s < other.end_s and other.start_s < one.end_s and not {*one.devices} & {*other.devices}
                for other in others)
            for one in ones
        )  # fmt: skip


@lru_cache(maxsize=1)
def observe(preset: str) -> Observed:
    spans = KeepAll()
    for_robots = "embodied" in preset
    settings = [f"schedule={preset}", "steps=6"]
    # The devices that gathering frees compute the pass of the reference.
    settings += ["algorithm.kl_coefficient=0.01"] if preset == "rlhfuse" else []
    recipe = load_recipe("robot" if for_robots else "longtail", settings)
    profile = TIGHT if MECHANISMS[preset] is switches else ROBOT_PROFILE if for_robots else PROFILE
    simulation = Simulation(profile=profile, num_devices=4)
    run = run_virtually(recipe, simulation, name=preset, recorder=lambda: spans).run
    return Observed(run, spans.spans)


def switches(seen: Observed) -> float:
    """Times that an engine came back to a device that another role had used."""
    return len([each for each in seen.of("rollout", "onload") if each.step > 1])


def training_beside_generation(seen: Observed) -> float:
    return seen.overlaps(seen.of("actor", "accumulate"), seen.of("rollout", "serve"))


def training_while_its_own_step_is_generated(seen: Observed) -> float:
    """Counts synchronous training calls that began before generation had ended its step."""
    assert seen.last("sched/staleness_max") == 0
    return training_beside_generation(seen)


def mixed_versions(seen: Observed) -> float:
    return seen.total("sched/mixed_versions")


def kept_in_mid_sequence(seen: Observed) -> float:
    assert seen.last("rollout/num_interrupted") == 0
    return mixed_versions(seen)


def interrupted(seen: Observed) -> float:
    return seen.last("rollout/num_interrupted")


def versions_side_by_side(seen: Observed) -> float:
    assert mixed_versions(seen) == 0, "a sequence ends under the version that it began with"
    return seen.last("rollout/most_versions") - 1


def migrated(seen: Observed) -> float:
    return seen.last("rollout/num_migrated")


def suspended(seen: Observed) -> float:
    return seen.last("rollout/num_suspended")


def surplus(seen: Observed) -> float:
    return seen.total("samples/surplus")


def one_version_behind(seen: Observed) -> float:
    assert seen.last("sched/staleness_max") == 1
    return training_beside_generation(seen)


def publications_less_often_than_steps(seen: Observed) -> float:
    return 6 - len({each.version for each in seen.of("rollout", "update_weights") if each.step})


def simulators_beside_policy(seen: Observed) -> float:
    return seen.overlaps(seen.of("env", "simulate"), seen.of("rollout", "serve"))


def simulators_apart(seen: Observed) -> float:
    """Counts calls of simulators, if no device of theirs ever serves the policy."""
    engines = {device for each in seen.of("rollout", "serve") for device in each.devices}
    assert not any(engines & {*each.devices} for each in seen.of("env", "simulate"))
    return len(seen.of("env", "simulate"))


def simulators_in_turns_with_policy(seen: Observed) -> float:
    assert simulators_beside_policy(seen) == 0
    return len(seen.of("env", "onload"))


MECHANISMS: dict[str, Callable[[Observed], float]] = {
    "areal": interrupted,
    "async-colocated": kept_in_mid_sequence,
    "asyncflow": versions_side_by_side,
    "dora": versions_side_by_side,
    "embodied-async": simulators_beside_policy,
    "forge": kept_in_mid_sequence,
    "kimi-partial-rollout": suspended,
    "laminar": migrated,
    "magistral": kept_in_mid_sequence,
    "one-step-off": one_version_behind,
    "pipelinerl": kept_in_mid_sequence,
    "rlhfuse": migrated,
    "rlinf-collocated": switches,
    "rlinf-disaggregated": training_while_its_own_step_is_generated,
    "rlinf-embodied-collocated": simulators_in_turns_with_policy,
    "rlinf-embodied-disaggregated": simulators_apart,
    "rlinf-embodied-hybrid": simulators_beside_policy,
    "rlinf-hybrid": migrated,
    "rollpacker": surplus,
    "streamrl-async": one_version_behind,
    "streamrl-sync": training_while_its_own_step_is_generated,
    "verl-colocate-async": interrupted,
    "verl-colocated": switches,
    "verl-fully-async-a": training_while_its_own_step_is_generated,
    "verl-fully-async-b": publications_less_often_than_steps,
    "verl-fully-async-c": publications_less_often_than_steps,
    "verl-fully-async-d": interrupted,
    "verl-separate-async-switch": interrupted,
}


@pytest.mark.parametrize("preset", preset_names())
def test_the_mechanism_of_a_preset_fires_as_shipped(preset: str) -> None:
    assert MECHANISMS[preset](observe(preset)) > 0


@pytest.mark.parametrize("preset", [name for name in preset_names() if load_schedule(name).dispatch == "skew_aware"])
def test_dispatch_by_skew_sets_long_responses_apart(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[tuple[int, int]] = []
    split = SkewAware._split

    def noting(self: SkewAware, lengths: Sequence[float], num_engines: int) -> tuple[int, int]:
        splits.append(split(self, lengths, num_engines))
        return splits[-1]

    monkeypatch.setattr(SkewAware, "_split", noting)
    observe.cache_clear()
    observe(preset)
    assert any(num_long for num_long, _ in splits)


def test_relative_lengths_follow_the_run() -> None:
    schedule = load_schedule("kimi-partial-rollout")
    assert schedule.budget_tokens(40.0) == 40 and schedule.budget_tokens(9000.2) == 9001
    tail = load_schedule("laminar").tail
    assert tail.kind == "migrate"
    assert tail.num_engines(20, 0.0, samples_per_engine=16) == 2
    assert tail.num_engines(20, 0.0, samples_per_engine=256) == 1
    assert tail.num_engines(20, 1.7, samples_per_engine=256) == 2, "as much of the KV cache as one may fill"
