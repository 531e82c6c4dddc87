"""Whole runs of behaviour cloning at toy size: from a recorded expert and from a data set, resumed, and then by RL."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.robots.experts import ExpertConfig
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.record import record
from interlace.run.session import TrainReport
from tests.support.robots import NEAR_DOT, assert_learned
from tests.support.training import equal_weights, final_weights, metrics, run_recipe

DOT = (
    *NEAR_DOT,
    "model.robot={state_size: 2, state_tokens: 1, action_size: 1, chunk: 2, bins: 8, layers: 1}",
)
CLONE = (
    *DOT,
    "replay.experts={episodes: 8, noise: [], demonstration_horizon: null}",
    "replay.draw_size=32",
    "steps=4",
    "optimizer={lr: 3e-3, schedule: constant, warmup_steps: 0, total_steps: null}",
)


def run(root: Path, name: str, overrides: Sequence[str] = (), **kwargs) -> TrainReport:
    settings = [*CLONE, f"model.cache_dir={root / 'cache'}", *overrides]
    return run_recipe("clone", root, name, settings, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clone")
    assert_learned(run(root, "whole"))
    return root


def test_only_demonstrations_are_trained_and_no_episode_is_stored(whole: Path) -> None:
    lines = metrics(whole, "whole")
    assert lines[-1]["replay/loss"] < lines[0]["replay/loss"]
    assert all("replay/size" not in line and "env/success" in line for line in lines)


def test_a_resumed_run_is_equal(whole: Path) -> None:
    assert run(whole, "stopped", stop_after=2).was_stopped
    assert run(whole, "stopped", resume=True).done_steps == 4
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))


def test_a_data_set_of_the_same_demonstrations_gives_the_same_policy(whole: Path) -> None:
    folder = whole / "demos"
    record(load_recipe("clone", CLONE), folder, ExpertConfig(episodes=8), fps=10, video=False)
    run(whole, "read", [f"replay.experts.dataset={folder}"])
    assert equal_weights(final_weights(whole, "read"), final_weights(whole, "whole"))


def test_reinforcement_starts_from_the_clone(whole: Path) -> None:
    settings = ["warmup=null", f"model.path={whole / 'whole' / 'checkpoints' / 'step_4'}", "steps=1", "minibatches=1"]
    report = run_recipe("robot", whole, "rl", [*DOT, f"model.cache_dir={whole / 'cache'}", *settings])
    after_cloning = run(whole, "whole", resume=True).after
    assert report.before is not None and after_cloning is not None
    assert report.before.greedy_accuracy == after_cloning.greedy_accuracy


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["replay.learner=imitation", "replay.experts=null"], "the learner `demonstrations` and algorithm bc"),
        (["algorithm=grpo", "samples_per_prompt=2"], "the learner `demonstrations` and algorithm bc"),
        (["replay.experts=null"], "learner demonstrations with experts not set"),
        (["replay.max_uses=3"], "draws uniformly from all demonstrations"),
        (["minibatches=2"], "minibatches=2"),
        (["world_model={}"], "stores no episodes"),
        (["replay.experts.dataset=missing"], "missing"),
        (["episode.expert={}"], "episode.expert=set"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_recipe(load_recipe("clone", [*CLONE, *overrides]))
