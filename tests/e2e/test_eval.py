"""`interlace eval` with several sets, pass@k and intervals, from the command line and from Python."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import interlace
from interlace.cli.main import app
from interlace.core.errors import UserError

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(8)]
OVERRIDES = ["evaluation.samples_per_prompt=4", "evaluation.pass_at=[1,4]", "evaluation.num_shown=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> interlace.TrainedRun:
    return interlace.train(
        model="tiny:micro", data=ROWS, reward=lambda response: len(response) % 2 == 0, heldout_size=4, steps=1,
        prompts_per_step=2, samples_per_prompt=2, sampling={"max_new_tokens": 4}, cluster={"devices": "cpu:2"},
        rollout={"max_running": 8, "max_tokens": 512}, logging={"loggers": []}, quiet=True, name="mine",
        folder=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip


def test_several_sets_pass_at_k_and_intervals(run: interlace.TrainedRun, tmp_path: Path) -> None:
    hard = tmp_path / "hard.jsonl"
    hard.write_text("".join(json.dumps({"prompt": f"{n}*7", "answer": str(n * 7)}) + "\n" for n in range(3)))
    found = interlace.evaluate(run, [*OVERRIDES, f"task.heldout_sets.hard={hard}"], quiet=True)
    assert {name: each["greedy"].num_prompts for name, each in found.estimates.items()} == {"": 7, "task": 4, "hard": 3}
    for each in found.estimates.values():
        assert list(each) == ["greedy", "average@4", "pass@1", "pass@4"]
        assert each["pass@1"].value == pytest.approx(each["average@4"].value)
        assert each["pass@4"].value >= each["pass@1"].value
        assert each["pass@4"].low is not None and each["pass@4"].low <= each["pass@4"].value <= each["pass@4"].high
    assert found.sampled_accuracy == pytest.approx(found.estimates[""]["average@4"].value)
    metrics = found.metrics()
    assert {"eval/pass@4", "eval/hard/pass@4", "eval/task/pass@1", "eval/task/accuracy_greedy"} <= set(metrics)
    assert found == interlace.evaluate(run, [*OVERRIDES, f"task.heldout_sets.hard={hard}"], quiet=True)


def test_the_command(run: interlace.TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((run.folder / "config.yaml").read_text())

    def command(*options: str) -> Result:
        return CliRunner().invoke(app, ["eval", str(run.checkpoint), "--recipe", str(recipe), *options])

    exact = ["reward=exact", *OVERRIDES]
    done = command(*exact, "--json")
    assert done.exit_code == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["estimates"][""]["pass@4"]["num_prompts"] == 4
    shown = command(*exact, "--quiet").stdout
    assert "pass@4, temperature 1" in shown and "95 % interval" in shown
    refused = command("reward=exact", "evaluation.pass_at=[8]")
    assert refused.exit_code == 2 and "pass@8 needs 8 sampled answers" in refused.stderr


def test_a_run_without_held_out_prompts_is_evaluated_on_others(run: interlace.TrainedRun, tmp_path: Path) -> None:
    """Rows that the run trained on cannot be held out afterwards."""
    with pytest.raises(UserError, match=r"none is held out. Name others to evaluate on: task\.heldout_sets\.NAME=FILE"):
        run.evaluate(["task.files.heldout_size=0"])
    (tmp_path / "other.jsonl").write_text('{"prompt": "9+9", "answer": "18"}\n')
    others = f"task.heldout_sets.other={tmp_path / 'other.jsonl'}"
    assert run.evaluate(["task.files.heldout_size=0", others]).num_prompts == 1


def test_a_set_without_its_file(run: interlace.TrainedRun) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        interlace.evaluate(run, ["task.heldout_sets.hard=missing.jsonl"], quiet=True)


def test_a_model_has_no_checkpoints_to_choose_from(run: interlace.TrainedRun) -> None:
    with pytest.raises(UserError, match="is not a run"):
        interlace.evaluate(str(run.checkpoint), recipe=str(run.folder / "config.yaml"), checkpoint="best", quiet=True)
