"""The command line has the documented commands, starts fast, and reports mistakes clearly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.schedule.presets import load_schedule, preset_names

ROOT = Path(__file__).parents[3]


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom interlace.cli.main import app\ntry: app()\nfinally:"
        " print([name for name in ('torch', 'transformers', 'ray', 'numpy') if name in sys.modules])"
    )
    done = python(code, "--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "eval", "doctor", "recipes", "presets"))
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_mistake_is_a_sentence_on_stderr_with_exit_code_2() -> None:
    done = python("from interlace.cli.main import app; app()", "presets", "one-step-of")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: unknown schedule 'one-step-of'. Did you mean 'one-step-off'?")
    assert "Traceback" not in done.stderr


def test_the_help_of_record_names_the_extra_for_videos() -> None:
    help_text = CliRunner().invoke(app, ["record", "--help"], terminal_width=200).stdout
    assert "interlace[video]" in " ".join(help_text.split())


def test_an_interrupt_of_the_imports_is_one_line() -> None:
    interrupt = (
        "import runpy, sys\nclass Interrupt:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nrunpy.run_module('interlace', run_name='__main__')"
    )
    done = python(interrupt, "train", "quickstart")
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr == "Interrupted before the command started.\n"


def test_an_unknown_option_exits_with_code_2() -> None:
    assert CliRunner().invoke(app, ["train", "quickstart", "--resum"]).exit_code == 2


def test_recipes_are_listed_with_what_they_are_for() -> None:
    done = CliRunner().invoke(app, ["recipes"])
    assert done.exit_code == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line[:1].strip()}
    assert lines["quickstart"].startswith("Sort digits")
    assert "exchanged is rejected." in " ".join(done.stdout.split()), "the whole first sentence, which has two lines"
    assert "smollm2" in lines


def test_presets_are_listed_with_what_they_are_for() -> None:
    done = CliRunner().invoke(app, ["presets"])
    assert done.exit_code == 0
    named = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert named == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_shown_as_a_file_that_gives_the_same_schedule(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["presets", name])
    copy = tmp_path / "copy.yaml"
    copy.write_text(done.stdout)
    assert load_schedule(str(copy)) == load_schedule(name)


@pytest.mark.parametrize(
    ("word", "sentences"),
    [
        ("max_staleness", ["ceil(K) versions is the most", "default: 0.0", "in areal", "max_head_offpolicyness"]),
        ("staleness_threshold", ["a word of verl", "fraction of a sync window", "here: schedule.max_staleness"]),
        ("--partial-rollout", ["a word of verl", "a word of slime", "rollout_budget"]),
        ("actor.max_lag", ["a word of PipelineRL", "unit: samples", "K x P x S x n samples"]),
        ("abort_resume", ["schedule.on_update", "stopped and submitted again"]),
        ("max_age", ["schedule.tail, a field", "rounds at the latest"]),
        ("granularity.actor", ["schedule.granularity, a field", "rounded up"]),
        ("0-75%", ["schedule.placement, a field"]),
        ("rollout_budget", ["default: none"]),
        ("areal", ["a preset", "https://arxiv.org/abs/2505.24298", "max_staleness: 4", "docs/schedules.md"]),
    ],
)
def test_a_word_is_explained(word: str, sentences: list[str]) -> None:
    done = CliRunner().invoke(app, ["presets", f"--explain={word}"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    told = " ".join(done.stdout.split())
    assert not [sentence for sentence in sentences if sentence not in told]


def test_a_word_of_ones_own_preset_is_explained_by_its_file(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("# Half a version ahead.\nmax_staleness: 0.5\n")
    done = CliRunner().invoke(app, ["presets", "--explain", str(own)])
    assert "Half a version ahead." in done.stdout and "max_staleness: 0.5" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["areal", "--explain=tail"], "NAME and --explain: give one of them"),
        (["nowhere/mine.yaml"], f"there is no such file (looked in {Path('nowhere').resolve()})"),
    ],
)
def test_what_presets_cannot_show_is_a_sentence(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["presets", *words])
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_what_the_output_cannot_show_is_spelled_out_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    own = tmp_path / "mine.yaml"
    own.write_text("# \u2713 half a version ahead.\nmax_staleness: 0.5\n", encoding="utf-8")
    done = python("from interlace.cli.main import app; app()", "presets", "--explain", str(own))
    assert done.returncode == 0, done.stderr
    assert "\\u2713 half a version ahead." in done.stdout


def test_a_word_that_has_no_meaning_here_is_refused_with_the_nearest() -> None:
    done = CliRunner().invoke(app, ["presets", "--explain", "staleness_treshold"])
    assert done.exit_code == 2 and "Did you mean 'staleness_threshold'?" in done.stderr
    done = CliRunner().invoke(app, ["presets", "--explain", "qqqqqqqq"])
    assert done.exit_code == 2 and "Did you mean" not in done.stderr
    assert len(done.stderr) < 500
    assert "episode.env.num_envs" in CliRunner().invoke(app, ["presets", "--explain", "n_rollout_threads"]).stdout


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("schedule.staleness_threshold=0.5", "write schedule.max_staleness"),
        ("max_head_offpolicyness=4", "write schedule.max_staleness"),
        ("train_batch_size=64", "write prompts_per_step"),
    ],
)
def test_another_systems_word_is_no_setting(setting: str, instead: str) -> None:
    done = CliRunner().invoke(app, ["train", "quickstart", setting])
    assert done.exit_code == 2 and instead in done.stderr


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_page_has_no_step_below_the_first(command: str) -> None:
    """The live page requested step -1 again and again, and the server refused it."""
    done = CliRunner().invoke(app, [command, "run", "--step", "-1"], terminal_width=200)
    assert done.exit_code == 2 and "Invalid value for '--step'" in done.output
