"""The commands of docs/tutorial.md run unmodified, except for a smaller model and fewer steps and tokens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.models.tiny import build_tiny

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def block(language: str, first_words: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return next(text for text in found if text.startswith(first_words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tutorial's files, and a small model with a chat template."""
    model, tokenizer = build_tiny("micro", 0)
    tokenizer.chat_template = CHAT
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text(block("json", "{"))
    (tmp_path / "myreward.py").write_text(block("python", "# myreward.py"))
    (tmp_path / "mine.yaml").write_text(block("yaml", "# mine.yaml"))
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_recipe_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["model.path=model", "steps=2", "checkpoint_every=1", "sampling.max_new_tokens=8"]
    settings += ["cluster.devices=cpu:2", "rollout.max_running=8", "rollout.max_tokens=4096"]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    done = CliRunner().invoke(app, ["train", "mine.yaml", *settings])
    assert done.exit_code == 0, done.output
    steps = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all({"reward/right", "reward/brief"} <= set(step) for step in steps), steps[0]
    lines = [line for file in (folder / "runs/mine/samples").iterdir() for line in file.read_text().splitlines()]
    assert len(lines) == 2 * 4 * 8
    assert len({json.loads(line)["prompt"] for line in lines}) == 4, "the other two, chats, are held out"
    [more] = re.findall(r"`interlace (train mine.yaml --resume) steps=100`", TEXT)
    commands = [[*more.split(), "steps=3"], ["report", "mine"], ["eval", "runs/mine", "--recipe", "mine.yaml"]]
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert len((folder / "runs/mine/metrics.jsonl").read_text().splitlines()) == 3
    assert (folder / "runs/mine/report.html").exists()
    assert "accuracy" in done.output


def test_the_recipe_is_tried_with_a_small_random_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = re.findall(r"`interlace (train mine.yaml model=.*?)`", TEXT)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output


def test_the_call_from_python_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    code = block("python", "import interlace").replace(MODEL, "model").replace("steps=50", "steps=2")
    code = code.replace("200}", '8}, cluster={"devices": "cpu:2"}, rollout={"max_running": 8, "max_tokens": 4096}')
    exec(code, {"__name__": "script"})
    assert "step_2" in capsys.readouterr().out


def test_the_reward_is_what_the_text_says(folder: Path) -> None:
    command = re.search(r"    python -c \"(.*?)\"\n", TEXT)
    assert command is not None
    assert run(folder, "-c", command[1]).strip() == "{'right': 1.0, 'brief': -0.011}"
