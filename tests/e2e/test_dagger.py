"""Whole runs of DAgger and HG-DAgger at toy size: the policy learns from labels in its own states, and resumes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.session import TrainReport
from tests.support.robots import NEAR_DOT, assert_learned
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, samples

DOT = (
    *NEAR_DOT,
    "model.robot={state_size: 2, state_tokens: 1, action_size: 1, chunk: 2, head: gaussian, layers: 1}",
    "steps=4",
    "replay={learner: expert, updates: 25, draw_size: 16}",
    "optimizer.lr=3e-3",
)


def run(root: Path, name: str, overrides: Sequence[str] = (), **kwargs) -> TrainReport:
    settings = [*DOT, f"model.cache_dir={root / 'cache'}", *overrides]
    return run_recipe("robot-dagger", root, name, settings, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dagger")
    assert_learned(run(root, "whole"))
    return root


def test_the_labels_of_all_steps_are_trained(whole: Path) -> None:
    lines = metrics(whole, "whole")
    assert [line["replay/size"] for line in lines] == [8, 16, 24, 32]
    assert lines[-1]["replay/loss"] < lines[0]["replay/loss"]
    assert all(line["env/taken_over"] == 0 for line in lines)


def test_a_resumed_run_is_equal(whole: Path) -> None:
    assert run(whole, "stopped", stop_after=2).was_stopped
    assert run(whole, "stopped", resume=True).done_steps == 4
    assert samples(whole, "stopped") == samples(whole, "whole")
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))


def test_an_expert_takes_over_when_the_policy_strays(whole: Path) -> None:
    run(whole, "takes-over", ["episode.expert.takes_over_above=0.3"])
    lines = metrics(whole, "takes-over")
    assert lines[0]["env/taken_over"] > 0.3 and lines[0]["env/success"] > 0.5
    assert lines[-1]["env/taken_over"] < lines[0]["env/taken_over"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["replay.learner=imitation"], "the learner `expert` and algorithm dagger"),
        (["episode.expert=null"], "episode.expert"),
        (["algorithm=grpo", "samples_per_prompt=2"], "the learner `expert` and algorithm dagger"),
        (["minibatches=2"], "minibatches=2"),
        (["model.robot.head=flow", "sampling.max_new_tokens=80"], "head=flow"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_recipe(load_recipe("robot-dagger", overrides))
