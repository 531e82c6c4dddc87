"""`interlace init` writes a project that trains as it is, and refuses to write over anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.init import write_project
from interlace.cli.main import app
from interlace.core.errors import UserError


def call(*command: str) -> str:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_project_trains_and_its_reward_can_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "interlace train recipe.yaml" in call("init", "digits")
    folder = tmp_path / "digits"
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert "digits" in (folder / "README.md").read_text() and "{{" not in (folder / "README.md").read_text()
    tried = subprocess.run([sys.executable, "my_reward.py"], capture_output=True, text=True, check=True)
    assert "'9': {'right': 1.0, 'brief': 0.0}" in tried.stdout
    assert "pypi.org" not in (folder / "README.md").read_text(), "no release exists there"
    call("train", "recipe.yaml", "steps=2", "warmup.steps=4", "eval_every=0", "cluster.devices=cpu:2")
    rows = [json.loads(line) for line in (folder / "runs/recipe/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all({"reward/right", "reward/brief"} <= set(row) for row in rows)


def test_the_questions_have_right_answers_and_the_same_order_each_time(tmp_path: Path) -> None:
    texts = [(write_project(tmp_path / name) / "data" / "questions.jsonl").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert len({row["prompt"] for row in rows}) == 720
    assert all(row["answer"] == max(letter for letter in row["prompt"] if letter.isdigit()) for row in rows)


@pytest.mark.parametrize("name", ["taken", "-x", "a b"])
def test_a_folder_with_files_and_a_bad_name_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"exists and is not an empty folder|is no name of a project"):
        write_project(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
