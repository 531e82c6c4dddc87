"""Episodes of several turns follow the profile on the virtual clock."""

from collections import Counter
from statistics import fmean

import pytest

from interlace.core.errors import UserError
from interlace.core.types import TerminalEvent
from interlace.forecast.online import list_lengths
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


def simulated(schedule: str, turns: Turns | None = TURNS, kv_tokens: int = 4000) -> Simulated:
    rollout = PROFILE.rollout.model_copy(update={"kv_tokens": kv_tokens})
    profile: Profile = PROFILE.model_copy(update={"turns": turns, "rollout": rollout})
    return simulate(recipe_of(schedule), Simulation(profile=profile, num_devices=8, num_prompts=64))


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
    turns = [length for result in results for ended in result.ended for length in list_lengths(ended.sample)]
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
