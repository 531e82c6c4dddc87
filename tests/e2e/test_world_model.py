"""A world model is fitted along with the policy, and provides a part of its episodes."""

from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.models.published import newest_model
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from tests.support.robots import DOT, played, run
from tests.support.training import equal_weights, final_weights, metrics, samples

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
    ],
)
def test_what_cannot_be_imagined_is_refused(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_settings(load_recipe("robot-world-model", [override]))
