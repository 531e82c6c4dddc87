"""Episodes of several turns follow the profile on the virtual clock."""

from collections import Counter
from statistics import fmean

import pytest

from interlace.core.errors import UserError
from interlace.core.types import TerminalEvent
from interlace.forecast.observed import list_responses
from interlace.forecast.profile.types import Profile, Turns
from interlace.forecast.simulate import Simulated, Simulation, simulate
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from tests.unit.forecast.test_simulate import PROFILE

TURNS = Turns(turns=(1, 3, 6), given_tokens=(10, 50), tool_s=(0.0, 0.5, 8.0))
EPISODE = "episode.name=tests.support.worker_episodes:ThreeTurns"


def recipe_of(schedule: str, *overrides: str) -> Recipe:
    sizes = ("prompts_per_step=4", "samples_per_prompt=3", "steps=3", "sampling.max_new_tokens=100")
    return load_recipe("quickstart", [f"schedule={schedule}", *sizes, EPISODE, *overrides])


def simulated(
    schedule: str,
    turns: Turns | None = TURNS,
    kv_tokens: int = 4000,
    *overrides: str,
    num_devices: int = 8,
    **costs: object,
) -> Simulated:
    rollout = PROFILE.rollout.model_copy(update={"kv_tokens": kv_tokens, **costs})
    profile: Profile = PROFILE.model_copy(
        update={"turns": turns, "rollout": rollout, "device_memory_bytes": 1000 // num_devices}
    )
    simulation = Simulation(profile=profile, num_devices=num_devices, num_prompts=64)
    return simulate(recipe_of(schedule, *overrides), simulation)


@pytest.mark.parametrize("eviction", ["fewest_tokens", "least_recent"])
def test_admission_of_whole_episodes_keeps_contexts_of_an_overloaded_engine(eviction: str) -> None:
    """Twelve samples of 21 turns, of 1,500 tokens, on one engine, whose cache has room for four of them."""
    many = Turns(turns=(21,), given_tokens=(10,), tool_s=(0.1, 2.0))

    def run(*overrides: str) -> Simulated:
        costs = {"eviction": eviction, "prefill_token_s": 1e-3}
        return simulated("verl-colocated", many, 6000, *overrides, num_devices=1, **costs)

    thrashing, whole = run(), run("schedule.concurrency=episodes")
    lost, found = (sum(result.run.values("rollout/history_reused")) / 3 for result in (thrashing, whole))
    assert lost < 0.5 and found > 0.7
    assert whole.seconds < thrashing.seconds
    ends = [Counter(ended.event for ended in result.events) for result in (thrashing, whole)]
    assert ends[0] == ends[1] == {TerminalEvent.TRAINED: 36}


def test_tools_that_run_as_a_batch_make_every_episode_wait_for_the_slowest() -> None:
    batch = TURNS.model_copy(update={"tools": "synchronous"})
    alone, together = (simulated("verl-colocated", turns, 40_000) for turns in (TURNS, batch))
    assert together.seconds > 1.3 * alone.seconds
    assert len(together.events) == len(alone.events) == 36
    with pytest.raises(UserError, match="rollout_budget"):
        simulated("kimi-partial-rollout", batch)


@pytest.mark.parametrize("preset", ["verl-colocated", "streamrl-async", "areal", "kimi-partial-rollout", "pipelinerl"])
def test_each_sample_ends_once_and_every_device_second_is_accounted_for(preset: str) -> None:
    result = simulated(preset)
    ends = Counter(ended.sample.key for ended in result.events)
    assert set(ends.values()) == {1}
    assert Counter(ended.event for ended in result.events)[TerminalEvent.TRAINED] >= 3 * 4 * 3
    assert result.ledger.total_s == pytest.approx(8 * result.seconds, rel=1e-3)
    sizes = [len(ended.sample.segments) for ended in result.events if ended.event == TerminalEvent.TRAINED]
    assert max(sizes) == 11 and min(sizes) == 1, "six turns and what was put in between them; one turn"


def test_contexts_that_are_kept_make_a_run_shorter_and_tools_fill_a_bin() -> None:
    roomy, tight = simulated("verl-colocated", kv_tokens=40_000), simulated("verl-colocated", kv_tokens=150)
    found, lost = (result.run.values("rollout/history_reused") for result in (roomy, tight))
    assert min(found) > 0.85, "but for turns that left an engine with more to do"
    assert sum(lost) < sum(found) - 0.3
    assert roomy.seconds < tight.seconds
    assert roomy.ledger.fraction("tool_wait") > 0.1


def test_a_planner_during_the_run_measures_the_lengths_of_turns() -> None:
    """Whole episodes were taken for responses, with the results of tools, and then each turn was that long."""
    results = simulated("verl-colocated").results
    turns = [length for result in results for ended in result.ended for length in list_responses(ended.sample)]
    responses = [
        len(segment.token_ids)
        for result in results
        for ended in result.ended
        for segment in ended.sample.segments
        if segment.sampled is None
    ]
    assert len(turns) == len(responses) > len([ended for result in results for ended in result.ended])
    assert fmean(turns) == pytest.approx(fmean(responses), rel=0.05)


def test_a_profile_without_turns_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"takes several turns, and the profile has no `turns`. Measure .* `interlace profile RECIPE --out",
    ):
        simulated("verl-colocated", turns=None)
