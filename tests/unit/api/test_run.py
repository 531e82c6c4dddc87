"""A trained run as a program holds it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import interlace
from interlace.api.run import TrainedRun
from interlace.api.sweep import _format_value, sweep
from interlace.core.errors import UserError
from interlace.core.yaml_text import parse_yaml
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import write_settings
from interlace.run.recipe.load import load_recipe


def test_the_settings_of_a_run_are_not_saved_with_its_model(tmp_path: Path) -> None:
    checkpoint = RunFolder(path=tmp_path / "run").checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    write_settings(checkpoint, {"steps": 1})
    saved = TrainedRun(folder=tmp_path / "run").save(tmp_path / "saved")
    assert [path.name for path in saved.iterdir()] == ["config.json"]


def test_a_checkpoint_is_not_saved_onto_itself(tmp_path: Path) -> None:
    """The files of the model in the folder are removed first, and they were the only ones."""
    checkpoint = RunFolder(path=tmp_path / "run").checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(UserError, match="the checkpoint itself"):
        TrainedRun(folder=tmp_path / "run").save(checkpoint, overwrite=True)
    assert (checkpoint / "config.json").exists()


def test_a_saved_model_replaces_the_files_of_another_one(tmp_path: Path) -> None:
    """transformers would load the adapter of the earlier model, or its chat template, with the new one."""
    checkpoint = RunFolder(path=tmp_path / "run").checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"mine": 1}')
    (tmp_path / "saved").mkdir()
    for name in ("config.json", "adapter_config.json", "chat_template.jinja", "notes.txt"):
        (tmp_path / "saved" / name).write_text("{}")
    run = TrainedRun(folder=tmp_path / "run")
    with pytest.raises(UserError, match="exists already"):
        run.save(tmp_path / "saved")
    saved = run.save(tmp_path / "saved", overwrite=True)
    assert {path.name: path.read_text() for path in saved.iterdir()} == {
        "config.json": '{"mine": 1}',
        "notes.txt": "{}",
    }
    with pytest.raises(UserError, match="is a file"):
        run.save(saved / "notes.txt", overwrite=True)


def test_a_checkpoint_without_some_weights_is_not_loaded(tmp_path: Path) -> None:
    """transformers would draw the missing weights at random."""
    folder = RunFolder.create(tmp_path, "mine")
    folder.write_config(load_recipe("quickstart"))
    checkpoint = folder.checkpoints / "step_1"
    loaded = load_model(ModelConfig(path="tiny:micro"))
    loaded.tokenizer.save_pretrained(checkpoint)
    whole = loaded.model.state_dict()
    loaded.model.save_pretrained(checkpoint, state_dict={name: whole[name] for name in list(whole)[:-2]})
    with pytest.raises(UserError, match="lacks 1 weights"):
        _ = TrainedRun(folder=tmp_path / "mine").model


def test_a_run_is_found_after_the_program_changed_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("runs"), "mine")
    folder.write_config(load_recipe("quickstart"))
    run = interlace.load_run("mine")
    assert str(run).startswith("TrainedRun 'mine' in runs/mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run.folder == tmp_path / "runs" / "mine"


@pytest.mark.parametrize("prompts", [5, {"role": "user", "content": "hi"}])
def test_prompts_that_are_no_text_and_no_list_are_refused(tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(UserError, match=r"prompts is a (int|dict).* Give text, or a list"):
        TrainedRun(folder=tmp_path).generate(prompts)


@pytest.mark.parametrize("settings", [{"optimizer.lr": 1e-4}, {"algorithm": "grpo"}, ["steps=1"]])
def test_settings_of_a_sweep_without_lists_are_refused(settings: Any) -> None:
    with pytest.raises(UserError, match=r"settings.* Give a (list|mapping)"):
        sweep("sft", settings)


@pytest.mark.parametrize("value", ["Think 😀.", "a # b", np.float64(1e-5), [1, "b: c"], None, True])
def test_a_value_of_a_sweep_is_the_same_in_its_recipe(value: Any) -> None:
    assert parse_yaml(_format_value(value)) == value


def test_a_value_of_a_sweep_that_is_no_setting_is_refused() -> None:
    with pytest.raises(UserError, match="is a type, and a value of a sweep is text"):
        sweep("sft", {"algorithm": ["sft", object]})  # type: ignore[list-item]  # a mistake


def test_a_run_on_given_rows_shows_its_held_out_loss(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path / "run")
    run.path.mkdir()
    run.write_config(load_recipe("sft"))
    run.metrics.write_text('{"step": 1, "actor/loss": 5.0}\n')
    run.evaluations.write_text('{"step": 0, "eval/loss": 5.5}\n{"step": 1, "eval/loss": 2.25}\n')
    assert "held-out loss: 5.500 -> 2.250" in str(TrainedRun(folder=run.path))
