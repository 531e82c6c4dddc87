"""The shell completes commands, recipes, settings, presets and runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.cli.preflight import complete_recipe, complete_run, complete_setting

MAIN = "import sys; sys.argv[0] = 'interlace'; from interlace.cli.main import app; app(prog_name='interlace')"


def test_a_shell_gets_the_recipes_that_begin_with_its_word(tmp_path: Path) -> None:
    asked = {"_INTERLACE_COMPLETE": "complete_bash", "COMP_WORDS": "interlace train quick", "COMP_CWORD": "2"}
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", MAIN]
    done = subprocess.run(
        command, env=os.environ | asked | {"PYTHONPATH": root}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["quickstart"], done.stderr


def test_words_are_completed_by_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert complete_recipe("mi") == ["mine.yaml"]
    assert complete_run("f") == ["first"] and complete_run("x") == []
    assert complete_setting("prompts_per") == ["prompts_per_step="]
    assert complete_setting("optimi") == ["optimizer."] and complete_setting("optimizer.l") == ["optimizer.lr="]
    assert complete_setting("algo") == ["algorithm.", "algorithm="] and complete_setting("best") == ["best.", "best="]
    assert "critic.optimizer.lr=" in complete_setting("critic.optimizer.") and complete_setting("steps.") == []
    assert complete_setting("schedule.max_st") == ["schedule.max_staleness="]
    assert complete_setting("schedule.placement.ro") == ["schedule.placement.rollout.", "schedule.placement.rollout="]
    assert "algorithm.name=" in complete_setting("algorithm.")
    for key in ("schedule.resolved", "schedule.open", "algorithm.settings"):
        assert complete_setting(key) == [], "a recipe refuses it"
    assert "schedule=areal" in complete_setting("schedule=are") and complete_setting("steps=1") == []


def test_a_section_that_may_be_a_word_is_completed_in_both_forms_at_each_depth() -> None:
    for key in ("model", "reference.model", "reference.service", "reward.model", "schedule.tail", "schedule.placement"):
        assert complete_setting(key) == [f"{key}.", f"{key}="]
    for key in ("optimizer", "warmup.optimizer", "actor.lora", "task.files"):
        assert complete_setting(key) == [f"{key}."], "it has no short form"
    assert complete_setting("reference.model.pa") == ["reference.model.path=", "reference.model.pad_token="]


def test_the_values_of_a_key_are_completed() -> None:
    assert complete_setting("schedule.on_update=k") == ["schedule.on_update=keep"]
    assert complete_setting("algorithm=ma") == ["algorithm=maxrl"]
    assert complete_setting("model.dtype=") == ["model.dtype=float32", "model.dtype=bfloat16"]
    assert complete_setting("nothing.at.all=") == []
