"""`interlace sweep` trains every combination, resumes, and names mistakes before any run starts."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import interlace
from interlace.api.sweep import _read_value
from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.open_progress import open_progress
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock
from interlace.observe.stop import StopSignal
from interlace.run.clusters.local import this_machine
from interlace.run.sweep import Sweep, Variant, load_sweep, normalize_number, split_values
from tests.support.training import REPOSITORY

SMALL = [
    "steps=2", "prompts_per_step=8", "task.reasoning_gym.train_size=32", "task.reasoning_gym.heldout_size=8",
    "logging.loggers=[]", "cluster.devices=cpu:2", "checkpoint_every=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*arguments: str) -> "tuple[int, str, str]":
    result = CliRunner().invoke(app, ["sweep", *arguments])
    return result.exit_code, result.stdout, result.stderr


def cores() -> int:
    return this_machine().num_cores


def settings(tmp_path: Path) -> list[str]:
    return [*SMALL, f"model.cache_dir={tmp_path / 'cache'}"]


def test_all_combinations_in_one_table_and_resumption(tmp_path: Path) -> None:
    grid = ["optimizer.lr=1e-5,1e-2", "seed=0,1"]
    code, out, err = sweep("sft", *settings(tmp_path), *grid, "--name", "grid", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["metric"] == "eval/loss" and Path(told["report"]).is_file()
    assert [run["settings"]["optimizer.lr"] for run in told["runs"]] == ["1e-2", "1e-2", "1e-5", "1e-5"]
    assert told["runs"][0]["metric"] <= told["runs"][1]["metric"] < told["runs"][2]["metric"]
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "grid").glob("*/metrics.jsonl")}
    assert {path.parent.name for path in times} == {
        f"lr-{lr}-seed-{seed}" for lr in ("1e-5", "0.01") for seed in (0, 1)
    }

    unfinished = tmp_path / "runs" / "grid" / "lr-0.01-seed-1"
    state = tmp_path / "runs" / "grid" / "sweep.json"
    state.write_text(json.dumps({"finished": [name for name in json.loads(state.read_text())["finished"]
                                              if name != unfinished.name]}))  # fmt: skip
    for path in unfinished.glob("checkpoints/step_2/*"):
        if path.is_file():
            path.unlink()
    found = interlace.sweep(
        "sft", {"optimizer.lr": ["1e-5", "1e-2"], "seed": np.arange(3)}, settings(tmp_path), name="grid", resume=True,
        quiet=True,
    )  # fmt: skip
    assert len(found.rows) == 6 and not found.failed and all(row["steps"] == 2 for row in found.rows)
    same = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(same) == 3, "finished runs are not trained again"
    assert len(found.result.over_seeds()) == 2 and found.result.over_seeds()[0][3] == 3
    assert "<table" in found._repr_html_()
    assert {(row["optimizer.lr"], row["seed"]) for row in found.rows} == {
        (lr, n) for lr in (1e-5, 1e-2) for n in range(3)
    }


def test_a_run_that_fails_takes_nothing_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.run import train as module

    train = module.train

    def broken(recipe: interlace.Recipe, *args: object, **options: object) -> object:
        if recipe.seed == 1:
            raise ValueError("a broken disk")
        if recipe.seed == 2:
            raise UserError("no prompt is left.")
        return train(recipe, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "train", broken)
    code, out, err = sweep("sft", *settings(tmp_path), "seed=0,1,2")
    assert code == 1 and "run seed-1 failed: ValueError: a broken disk" in err
    assert "run seed-2 failed: no prompt is left." in err, "without the class of the error"
    assert "Runs by eval/loss" in out and "--name sft-sweep --resume" not in out


def test_mistakes(tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        code, _, err = sweep("sft", *settings(tmp_path), *arguments)
        assert code == 2, err
        return err

    assert "unknown key 'optimizer.lrr'" in refusal("optimizer.lrr=1e-4,1e-3")
    assert "a sweep needs a setting with several values" in refusal("seed=0")
    assert "seed is given twice" in refusal("seed=0,1", "seed=2,3")
    assert "has an empty value" in refusal("seed=0,,1")
    assert "has the value 1 twice" in refusal("seed=1,1")
    assert "seed = 'a': it must be a whole number" in refusal("seed=a,b")
    assert "at most 1000" in refusal(f"seed={','.join(map(str, range(1001)))}")
    assert "give it (--name)" in refusal("seed=0,1", "--resume")
    assert "has no sweep to resume" in refusal("seed=0,1", "--resume", "--name", "none")
    assert "parallel = 0" in refusal("seed=0,1", "--parallel", "0")
    assert "at least one for each run" in refusal("seed=0,1", "--parallel", "4096")
    code, _, err = sweep("sft", "seed=0,1", f"cluster.devices=cpu:{4 * cores()}", "--parallel", "2")
    assert code == 2 and "which do not suffice" in err
    assert not (tmp_path / "runs").exists()


def test_a_number_has_one_name_in_all_spellings() -> None:
    """The command line has 1e-5, and the same value of a program is 1e-05: a resumed sweep looks for the run's name."""
    spellings = ("1e-5", "1e-05", "0.00001", "1.0E-5", "+1e-5")
    assert {normalize_number(each) for each in spellings} == {"1e-5"}
    assert [normalize_number(each) for each in ("1e-2", "0.10", "3e-4", "-2.5", "1e20")] == [
        "0.01", "0.1", "3e-4", "-2.5", "1e20"
    ]  # fmt: skip
    assert [normalize_number(each) for each in ("64", "0", "2026-11-28", "null", "e5", "1e999", "grpo")] == [
        "64", "0", "2026-11-28", "null", "e5", "1e999", "grpo"
    ]  # fmt: skip
    with pytest.raises(UserError, match="has the value 1e-5 twice"):
        split_values("optimizer.lr=1e-5,1e-05")


def test_runs_that_have_the_number_as_written_in_their_name_are_not_trained_again(tmp_path: Path) -> None:
    arguments = [*settings(tmp_path), "optimizer.lr=0.001,3e-4"]
    variants = load_sweep("sft", arguments)
    folder = tmp_path / "runs" / "grid"
    for name, variant in zip(("lr-0.001", "lr-3e-4"), variants, strict=True):
        RunFolder.create(folder, name).write_config(variant.recipe)
    (folder / "sweep.json").write_text('{"finished": ["lr-0.001", "lr-3e-4"]}')
    with open_progress(Console(quiet=True), num_steps=2, quiet=True) as progress, StopSignal(lambda: None) as stop:
        result = Sweep(folder, variants, order=None, resume=True).run(progress, stop)
    assert result.num_left == 0 and not result.failed
    assert {path.parent.name for path in folder.glob("*/config.yaml")} == {"lr-1e-3", "lr-3e-4"}
    assert not [*folder.glob("*/metrics.jsonl")]


def test_commas_within_brackets_and_quotes_do_not_separate() -> None:
    assert split_values("a=[1,2],[3]") == ["[1,2]", "[3]"]
    assert split_values("a=1e-5,1,01") == ["1e-5", "1", "01"]
    assert split_values("a={b: 1, c: 2}") == ["{b: 1, c: 2}"]
    assert split_values("a=\"x,y\",'z'") == ['"x,y"', "'z'"]
    assert split_values("a=it's,b") == ["it's", "b"], "an apostrophe in a word is not a quote"
    assert split_values(r'a="x\",y",z') == [r'"x\",y"', "z"]
    assert split_values("a='it''s, so',b") == ["'it''s, so'", "b"]
    assert split_values('a=["x,]",1],2') == ['["x,]",1]', "2"]
    assert split_values("a=],1") == ["]", "1"]
    assert split_values("a={x: [1, {y: 2}]},null") == ["{x: [1, {y: 2}]}", "null"]
    with pytest.raises(UserError, match="null leaves a setting unset"):
        split_values("a=,1")
    for text in ("a=[1,2", 'a="x,y'):
        with pytest.raises(UserError, match="cannot be separated"):
            split_values(text)


def test_values_with_commas_brackets_and_quotes_reach_the_runs(tmp_path: Path) -> None:
    texts = ["a, b", 'say "x"', "it's", "[1]", "a/b", "{prompt}"]

    def load(given: list[str]) -> "list[Variant]":
        betas = "optimizer.betas=[0.9,0.95],[0.9,0.99]"
        arguments = [f"task.format.system={','.join(map(json.dumps, given))}", betas]
        return load_sweep("quickstart", [*settings(tmp_path), "warmup=null", *arguments])

    variants = load(texts)
    assert [variant.recipe.task.format.system for variant in variants[::2]] == texts
    assert [variant.recipe.optimizer.betas for variant in variants[:2]] == [(0.9, 0.95), (0.9, 0.99)]
    names = {variant.name: variant.recipe for variant in variants}
    assert len(names) == len(variants), "each combination has a folder"
    assert names == {variant.name: variant.recipe for variant in load(texts[::-1])}, "the order of values has no effect"


def test_a_fixed_setting_of_a_swept_section_reaches_the_runs(tmp_path: Path) -> None:
    arguments = ["algorithm=grpo,rloo", "algorithm.kl_coefficient=0.05"]
    for order in (arguments, arguments[::-1]):  # interlace.sweep gives the fixed settings first
        variants = load_sweep("quickstart", [*settings(tmp_path), *order, "warmup=null"])
        found = [variant.recipe.algorithm.model_dump(mode="json") for variant in variants]
        assert [(each["name"], each["kl_coefficient"]) for each in found] == [("grpo", 0.05), ("rloo", 0.05)]


def test_runs_are_ordered_in_the_direction_of_best(tmp_path: Path) -> None:
    arguments = [*settings(tmp_path), "optimizer.lr=1e-5,1e-2", "eval_every=1", "best={metric: eval/loss, mode: max}"]
    code, out, err = sweep("sft", *arguments, "--json")
    assert code == 0, err
    assert [run["settings"]["optimizer.lr"] for run in json.loads(out)["runs"]] == ["1e-5", "1e-2"]


def test_finished_runs_of_removed_values_do_not_count_as_finished(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "less"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"finished": ["seed-0", "seed-1"]}))
    variants = load_sweep("sft", [*settings(tmp_path), "seed=2,3"])
    with open_progress(Console(quiet=True), num_steps=2, quiet=True) as progress, StopSignal(lambda: None) as stop:
        signal.raise_signal(signal.SIGINT)
        assert Sweep(folder, variants, order=None, resume=True).run(progress, stop).num_left == 2


def test_a_sweep_whose_runs_are_being_trained_is_not_resumed(tmp_path: Path) -> None:
    """The second process deleted the folders of runs without a checkpoint, while the first one trained them."""
    folder, variants = tmp_path / "runs" / "one", load_sweep("sft", [*settings(tmp_path), "seed=0,1"])
    Sweep(folder, variants, order=None, resume=False)
    with RunLock(RunFolder(path=folder)), pytest.raises(UserError, match="is being trained by process"):
        Sweep(folder, variants, order=None, resume=True)


@pytest.mark.slow
def test_runs_in_parallel_equal_runs_in_sequence(tmp_path: Path) -> None:
    alone = interlace.sweep("sft", {"seed": [0, 1]}, settings(tmp_path), name="alone", quiet=True)
    found = interlace.sweep("sft", {"seed": [0, 1, 2]}, settings(tmp_path), name="both", parallel=2, quiet=True)
    assert not found.failed and len(found.rows) == 3 and found.report is not None
    told = {str(row["seed"]): row["eval/loss"] for row in found.rows}
    for row in alone.rows:
        assert told[str(row["seed"])] == pytest.approx(row["eval/loss"], abs=1e-5)
    state = tmp_path / "runs" / "both" / "sweep.json"
    assert json.loads(state.read_text())["finished"] == ["seed-0", "seed-1", "seed-2"]


def test_a_stop_ends_parallel_runs_at_a_step_and_a_resumption_finishes_them(tmp_path: Path) -> None:
    folder, variants = tmp_path / "runs" / "both", load_sweep("sft", [*settings(tmp_path)[1:], "steps=400", "seed=0,1"])
    with open_progress(Console(quiet=True), num_steps=2, quiet=True) as progress, StopSignal(lambda: None) as stop:

        def stop_in_training() -> None:
            while not any(path.stat().st_size for path in folder.glob("*/metrics.jsonl")):
                threading.Event().wait(0.1)
            signal.raise_signal(signal.SIGINT)

        sweep_ = Sweep(folder, variants, order=None, resume=False)
        waiter = threading.Thread(target=stop_in_training)
        waiter.start()
        result = sweep_.run(progress, stop, parallel=2)
        waiter.join()
    assert result.num_left == 2 and not result.failed, result.failed
    steps = {path.name: Checkpoints(path / "checkpoints", keep=1).steps() for path in folder.glob("seed-*")}
    assert any(steps.values()) and not any(400 in found for found in steps.values())


def test_a_failed_process_is_reported_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "ends_itself.py").write_text("import os\ndef score(response):\n    os._exit(7)\n")
    code, _, err = sweep(
        "quickstart", *settings(tmp_path), "warmup=null", "reward={name: ends_itself:score, workers: 0}", "seed=0,1",
        "--parallel", "2",
    )  # fmt: skip
    assert code == 1 and "run seed-0 failed: the process ended with 7" in err and "run seed-1 failed" in err


@pytest.mark.slow
def test_an_error_that_is_longer_than_a_pipe_holds_does_not_hang_a_parallel_sweep(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "class Logger:\n    def __init__(self, info):\n        raise ValueError('x' * 200_000)\n"
    )
    quiet, loud = "logging.loggers=[]", "logging.loggers=[loud:Logger]"
    arguments = [loud if each == quiet else each for each in settings(tmp_path)]
    arguments += ["seed=0,1", "--parallel", "2", "--name", "loud"]
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "sweep", "sft", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 1 and "run seed-0 failed" in done.stderr and "xxx" in done.stderr


def test_a_misspelled_metric_is_refused_before_the_first_run(tmp_path: Path) -> None:
    code, _, err = sweep("sft", *settings(tmp_path), "seed=0,1", "--metric", "eval/los")
    assert code == 2 and "Did you mean 'eval/loss'" in err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_metric_ends_the_sweep_after_its_first_run(tmp_path: Path) -> None:
    code, _, err = sweep("sft", *settings(tmp_path), "seed=0,1", "--metric", "eval/margin", "--name", "odd")
    assert code == 2 and "no such metric" in err and "--name odd --resume --metric" in err
    assert not (tmp_path / "runs" / "odd" / "seed-1").exists()


def test_a_swept_value_is_a_number_or_text() -> None:
    read = _read_value
    assert [read(text) for text in ("3", "1e-5", "true", "null", "grpo")] == [3, 1e-5, True, None, "grpo"]
    assert read("2024-01-01") == "2024-01-01", "a date is no JSON"
