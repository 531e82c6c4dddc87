"""Runs of agents give the same samples and weights under every synchronous schedule, and after a stop."""

from pathlib import Path

import pytest

from interlace.core.types import Prompt
from interlace.observe.stop import StopSignal
from interlace.rollouts.base import Session
from interlace.run.equivalence import certify, toy, variants
from interlace.run.recipe.load import load_recipe
from tests.support.reward_functions import size
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, samples, shared_cache

SMALL = (
    "steps=3",
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "warmup.steps=4",
    "warmup.until=null",
    "warmup.batch_size=8",
    "task.reasoning_gym.train_size=32",
    "task.reasoning_gym.heldout_size=4",
    "logging.loggers=[]",
    "cluster.devices=cpu:2",
    "eval_every=0",
)
AGENTS = [("react", "langgraph"), ("program", "openai")]
"""Recipes whose agent is another's code, and the package that it needs."""


def test_samples_of_two_turns_are_the_same_under_every_synchronous_schedule(tmp_path: Path) -> None:
    recipe = toy(load_recipe("second_guess", [*SMALL, "minibatches=1", shared_cache()]))
    every = variants(recipe)
    chosen = {name: every[name] for name in ("as given", "disaggregated", "streaming", "dispatch", "partial")}
    for trial in certify(chosen, tmp_path / "runs", StopSignal(lambda: None)):
        assert trial.same_samples and trial.holds and trial.moved > 1e-5, trial


def test_a_stopped_run_of_an_agent_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = [*SMALL, shared_cache()]
    run_recipe("second_guess", tmp_path, "whole", settings)
    run_recipe("second_guess", tmp_path, "stopped", settings, stop_after=1)
    run_recipe("second_guess", tmp_path, "stopped", settings, resume=True)
    assert metrics(tmp_path, "stopped") == metrics(tmp_path, "whole")
    assert samples(tmp_path, "stopped") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "stopped"), final_weights(tmp_path, "whole"))
    for line in metrics(tmp_path, "whole"):
        assert line["episode/turns_mean"] == 2 and line["episode/reused_share"] == line["episode/branches_mean"] == 1
        assert {"reward/first", "reward/second"} <= set(line)


class Bonus:
    """Rewards the turn of some samples, and leaves the rest of the reward to the recipe."""

    async def run(self, prompt: Prompt, session: Session) -> None:
        turn = await session.generate(prompt.messages)
        if len(turn.token_ids) % 2:
            session.reward(turn, 0.25)


def test_rewards_of_turns_are_added_to_the_recipe_s_reward(tmp_path: Path) -> None:
    """Otherwise the samples without one would be scored by the recipe's reward, and the others by theirs alone."""
    own = [f"episode={__name__}:Bonus", "reward=tests.support.reward_functions:size", "steps=1"]
    run_recipe("second_guess", tmp_path, "bonus", [*SMALL, shared_cache(), *own])
    rows = samples(tmp_path, "bonus")
    assert {bool(int(str(row["num_tokens"])) % 2) for row in rows} == {True, False}
    for row in rows:
        bonus = 0.25 * (int(str(row["num_tokens"])) % 2)
        assert row["reward"] == pytest.approx(size(str(row["response"])) + bonus)
    assert metrics(tmp_path, "bonus")[0]["reward/turn_rewards"] == 0.25, "the mean over the samples that have the part"


@pytest.mark.parametrize(("recipe", "package"), AGENTS)
def test_an_agent_that_knows_nothing_of_training_trains(tmp_path: Path, recipe: str, package: str) -> None:
    pytest.importorskip(package)
    settings = [
        *SMALL,
        "steps=1",
        "minibatches=1",
        "sampling.max_new_tokens=16",
        shared_cache(),
    ]
    settings += ["algorithm.drop_zero_variance=false", "reward.shaping.length_weight=1"]
    assert run_recipe(recipe, tmp_path, recipe, settings).done_steps == 1
    [line] = metrics(tmp_path, recipe)
    assert line["samples/trained"] == 8 and not line["samples/failed"]
    assert line["episode/turns_mean"] >= 1 and line["actor/logprob_gap"] < 1e-4 and line["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "package"), [("calculator", "numpy"), ("second_guess", "numpy"), *AGENTS])
def test_a_recipe_of_an_agent_learns(tmp_path: Path, recipe: str, package: str) -> None:
    pytest.importorskip(package)
    report = run_recipe(recipe, tmp_path, recipe, ["eval_every=0", shared_cache()])
    assert report.before and report.after and report.before.sampled_accuracy is not None
    assert report.after.sampled_accuracy is not None
    assert report.after.sampled_accuracy >= report.before.sampled_accuracy + 0.2
