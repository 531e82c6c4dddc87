"""`interlace compare` runs one recipe under several schedules and prints one table."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.observe.goodput import BINS
from tests.support.training import SMALL, shared_cache


def compare(*arguments: str) -> "tuple[int, str, str]":
    result = CliRunner().invoke(app, ["compare", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_schedules_side_by_side(tmp_path: Path) -> None:
    schedules = "verl-colocated,one-step-off"
    settings = [*SMALL, shared_cache(), "evaluation.samples_per_prompt=0"]
    code, out, err = compare("quickstart", *settings, "--schedules", schedules, "--steps", "3", "--json")
    assert code == 0, err
    told = json.loads(out)
    first, second = told["schedules"]
    assert [row["schedule"] for row in (first, second)] == schedules.split(",")
    assert first["ratio_to_first"] == {"step_s": 1, "tokens_per_s": 1, "trained_tokens_per_device_s": 1}
    assert second["ratio_to_first"]["step_s"] == pytest.approx(second["step_s"] / first["step_s"])
    assert (first["staleness_max"], second["staleness_max"]) == (0, 1)
    for row in (first, second):
        assert row["steps"] == 3
        assert sum(row["goodput"][name] for name in BINS) == pytest.approx(1)
        assert row["length_mean_shift"] == pytest.approx(row["length_trained_mean"] - row["length_generated_mean"])
        assert (tmp_path / row["folder"] / "metrics.jsonl").exists()
    names = [Path(row["folder"]).name for row in (first, second)]
    page = (tmp_path / told["report"]).read_text()
    assert all(f'aria-label="{part} of {name}"' in page for part in ("Summary", "Ledger") for name in names)
    result = CliRunner().invoke(app, ["report", names[1]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip().endswith("report.html")


def test_a_schedule_that_fails_takes_nothing_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "astray.py").write_text(
        "from interlace.schedule.dispatch import DispatchPolicy\n\n\nclass Astray(DispatchPolicy):\n"
        "    def assign(self, expected_tokens, loads):\n        raise RuntimeError('no engine will do')\n"
    )
    (tmp_path / "astray.yaml").write_text("dispatch: astray:Astray\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = [*SMALL, "warmup=null", "evaluation.num_prompts=1", "evaluation.samples_per_prompt=0", "steps=1"]
    code, out, err = compare("quickstart", *settings, "--schedules", "astray.yaml,verl-colocated", "--json")
    assert code == 1 and "schedule astray.yaml failed: RuntimeError: no engine will do" in err
    assert [row["schedule"] for row in json.loads(out)["schedules"]] == ["verl-colocated"]


def test_a_report_of_what_is_no_run_is_refused() -> None:
    result = CliRunner().invoke(app, ["report", "nowhere"])
    assert result.exit_code == 2 and "'nowhere' is not a run" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--schedules", "verl-colocated,areol"], "Did you mean 'areal'"),
        (["--schedules", "areal,areal"], "one is named twice"),
        (["schedule=areal", "--schedules", "areal"], "both name the schedule"),
        (["--cluster", "sim", "--schedules", "areal"], "--profile is missing: measure one with `interlace profile"),
        (["--cluster", "rya", "--schedules", "areal"], "Did you mean 'ray'"),
        (["--schedules", ","], "no schedule is named"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    code, _, err = compare("quickstart", *SMALL, *arguments)
    assert code == 2 and sentence in err
    assert not (tmp_path / "runs").exists()


def test_schedules_are_compared_on_devices_that_are_not_there(tmp_path: Path) -> None:
    arguments = ("--cluster", "sim", "--devices", "8", "--profile", "qwen2.5-7b-h800", "--steps", "3", "--json")
    code, out, err = compare("quickstart", "prompts_per_step=4", "--schedules", "verl-colocated,areal", *arguments)
    assert code == 0, err
    told = json.loads(out)
    assert [row["schedule"] for row in told["schedules"]] == ["verl-colocated", "areal"]
    assert all(sum(row["goodput"].values()) == pytest.approx(1) for row in told["schedules"])
    assert "areal" in (tmp_path / told["report"]).read_text()


def test_many_schedules_are_whole_on_a_narrow_terminal() -> None:
    names = ["verl-colocated", "areal", "one-step-off", "verl-fully-async-a", "kimi-partial-rollout", "asyncflow"]
    arguments = ["quickstart", "prompts_per_step=4", "steps=2", "--schedule", ",".join(names)]
    command = ["simulate", *arguments, "--profile", "qwen2.5-7b-h800"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    assert "\u2026" not in result.stdout, "nothing is cut short"
    assert all(result.stdout.count(name) == 1 for name in names)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("(1.00x)") >= 3, "ratios of all tables are against the first schedule"
