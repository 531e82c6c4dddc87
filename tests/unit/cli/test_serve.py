"""`interlace serve` chooses a checkpoint of a run, or a folder, and refuses the others before any work."""

from pathlib import Path

import pytest

from interlace.cli.eval import choose_model
from interlace.cli.serve import make_served_policy, make_served_recipe
from interlace.core.errors import UserError
from interlace.models.config import ModelConfig
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.jsonl import to_line
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.load import load_recipe


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def make_run(root: Path) -> RunFolder:
    """A run with the checkpoints of the steps 1 and 2, of which the first has the higher reward."""
    run = RunFolder.create(root, "mine")
    run.write_config(load_recipe("quickstart", ["best=reward/mean"]))
    for step in (1, 2):
        Checkpoints(run.checkpoints, keep=2).save(step, write_model, num_bytes=0)
    rows = [{"step": step, "reward/mean": 3.0 - step} for step in (1, 2)]
    run.metrics.write_text("".join(map(to_line, rows)))
    return run


def test_a_checkpoint_is_chosen(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def served(*checkpoint: "str | int") -> Path:
        return Path(make_served_recipe(str(run.path), [], *checkpoint).model.path)

    assert served() == served("newest") == run.checkpoints / "step_2"
    assert served(1) == served("1") == served("best") == run.checkpoints / "step_1"
    other = tmp_path / "other"
    other.mkdir()
    write_model(other)
    assert served(str(other)) == other


@pytest.mark.parametrize("name", ["run #3", "a: b", "12", "größe 😀"])
def test_the_name_of_a_model_is_text_and_not_yaml(name: str) -> None:
    assert make_served_recipe(name, []).model.path == name


def test_another_model_is_not_evaluated_with_the_tokenizer_of_the_recipe() -> None:
    trained = ModelConfig(path="base", tokenizer="instruct", dtype="bfloat16")
    assert choose_model(trained, "base", []) == trained
    assert choose_model(trained, "other", []) == ModelConfig(path="other", dtype="bfloat16")
    assert choose_model(trained, "other", ["model.tokenizer=instruct"]).tokenizer == "instruct"


def test_mistakes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for spec, checkpoint, message in (
        (str(run.path), "7", "one of the steps 1, 2"),
        (str(run.path), "bset", "Choose newest, best or"),
        (str(run.path), str(tmp_path), "not the folder of a model, because it has no config.json"),
        ("tiny:micro", "best", "'tiny:micro' is not a run. Name the run, or leave --checkpoint out"),
    ):
        with pytest.raises(UserError, match=message):
            make_served_recipe(spec, [], checkpoint)


def test_a_policy_that_does_not_exist_is_refused_with_its_three_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'robot-7' is neither a run in runs/, nor the folder of a published policy"):
        make_served_policy("robot-7", [])
