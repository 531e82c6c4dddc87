"""A world model is fitted along with the policy, and provides a part of its episodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.models.published import newest_model
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from interlace.run.replay import open_learning
from tests.support.robots import DOT, played, run
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, samples

pytest.importorskip("gymnasium")
IMAGINING = (
    *DOT,
    "model.robot.chunk=1",
    "sampling.max_new_tokens=1",
    "task.starts={instructions: [push the puck down], train_size: 64, heldout_size: 0, imagined_per_start: 1}",
    "episode.env.settings={tasks: [near], horizon: 8}",
    "episode.imagined={chunks: 4, max_disagreement: 2.0, slots: 2}",
    "algorithm={name: ppo, advantage_of: turn}",
    "warmup.steps=20",
    "prompts_per_step=8",
    "samples_per_prompt=2",
    "minibatches=1",
    "steps=3",
    "replay={updates: 0}",
    "world_model={fit_steps: 60, width: 32}",
)
PICTURES = (
    "steps=3",
    "prompts_per_step=4",
    "minibatches=1",
    "epochs=1",
    "task.starts.heldout_size=0",
    "episode.env.num_envs=2",
    "episode.env.settings.horizon=6",
    "episode.imagined={chunks: 4, max_error: 100, slots: 2}",
    "world_model={kind: latent, fit_steps: 4, latent: {filters: 2, recurrent_size: 16, hidden_size: 16, sequences: 4}}",
    "cluster.devices=cpu:1",
    "logging.loggers=[]",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imagining")
    run(root, "whole", IMAGINING)
    return root


def test_episodes_are_imagined_once_there_is_a_model_and_counted_apart(whole: Path) -> None:
    first, *later = metrics(whole, "whole")
    assert "imagined/success" not in first, "without a model the simulator plays all"
    for line in later:
        assert 0 <= line["imagined/success"] <= 1
        assert line["imagined/episode_length"] <= 4
        assert line["samples/trained"] == 16
        assert line["replay/size"] < 16 * line["step"], "only what was really played is kept"
        assert np.isfinite(line["world_model/loss"]) and line["world_model/error_1"] > 0
    assert "timing_s/world_model" in (whole / "whole" / "metrics.jsonl").read_text()
    assert newest_model(whole / "whole" / "world_model") is not None


def test_a_stopped_run_imagines_on_as_if_it_had_not_stopped(whole: Path) -> None:
    run(whole, "stopped", IMAGINING, stop_after=2)
    assert run(whole, "stopped", IMAGINING, resume=True).done_steps == 3
    assert played(whole, "stopped")[-1] == played(whole, "whole")[-1]
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))


def test_the_model_may_have_devices_of_its_own(whole: Path) -> None:
    run(whole, "apart", [*IMAGINING, "schedule.placement.actor=0", "schedule.placement.world_model=1"])
    assert samples(whole, "apart") == samples(whole, "whole")


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("replay=null", "keeps none"),
        ("world_model=null", "fits none"),
        ("episode.imagined=null", "no episode.imagined"),
        ("world_model.kind=latent", "predicts pictures alone"),
        ("model.robot.image_size=48", "predicts state vectors"),
        ("episode.imagined={chunks: 4}", "not bounded by the model's error"),
        ("episode.env.settings.end_on_success=false", "solved by the last chunk of its episode"),
    ],
)
def test_what_cannot_be_imagined_is_refused(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_settings(load_recipe("robot-world-model", [override]))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("world_model.kind=ensemble", "predicts state vectors"),
        ("model.robot.image_size=50", "a multiple of 16"),
        ("model.robot.state_size=3", "predicts pictures alone"),
        ("episode.imagined={max_disagreement: 0.5}", "cannot disagree"),
        ("episode.imagined={max_error: 1.0, max_disagreement: 0.5}", "cannot disagree"),
    ],
)
def test_what_cannot_be_imagined_in_pictures_is_refused(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_settings(load_recipe("robot-world-model-pixels", [override]))


@pytest.mark.slow
def test_pictures_are_imagined_once_the_error_is_measured_and_a_stopped_run_continues_exactly(tmp_path: Path) -> None:
    settings = [*PICTURES, f"model.cache_dir={tmp_path / 'cache'}"]
    run_recipe("robot-world-model-pixels", tmp_path, "whole", settings)
    first, second, third = metrics(tmp_path, "whole")
    assert "imagined/return" not in first and "imagined/return" not in second, "no error was measured before"
    assert "world_model/error_1" not in first and second["world_model/error_1"] > 0
    assert 1 <= third["imagined/episode_length"] <= 4
    run_recipe("robot-world-model-pixels", tmp_path, "stopped", settings, stop_after=2)
    run_recipe("robot-world-model-pixels", tmp_path, "stopped", settings, resume=True)
    assert played(tmp_path, "stopped")[-1] == played(tmp_path, "whole")[-1]
    assert equal_weights(final_weights(tmp_path, "stopped"), final_weights(tmp_path, "whole"))


def test_a_world_model_learns_actions_as_the_simulator_executes_them(tmp_path: Path) -> None:
    groups: Any = SimpleNamespace(others={"world_model": [None]})
    for end in (1.0, 2.0):  # of the policy's range; Pendulum's ends at 2
        recipe = load_recipe("robot-world-model-pixels", [f"model.robot.low=[{-end}]", f"model.robot.high=[{end}]"])
        learning = open_learning(recipe, tmp_path / str(end), None, groups)
        assert learning is not None and learning.world is not None
        numbers = np.array([-3.0, 0.5, 1.5], np.float32)
        found = [float(learning.world.decode(number[None].view(np.int32))[0, 0]) for number in numbers]
        assert found == np.clip(end * numbers, -2, 2).tolist()
        assert learning.world.bounds == ((-2.0,), (2.0,))
