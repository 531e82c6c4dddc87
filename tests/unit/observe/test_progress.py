"""Progress is shown on a terminal, in a log file, and suppressed with --quiet."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from interlace.observe.notebook import NotebookProgress
from interlace.observe.open_progress import open_progress
from interlace.observe.progress import ProgressView, StepLine, brief, duration, short
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.load import load_recipe

METRICS = {
    "reward/mean": 1.25,
    "response_length/mean": 14.2,
    "sched/staleness_mean": 0.5,
    "perf/throughput": 3210.0,
    "timing_s/step": 2.0,
    "timing_s/rollout": 1.5,
    "timing_s/train": 0.25,
    "timing_s/anything": 0.25,
}


def shown(*, terminal: bool, quiet: bool = False, width: int = 120) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    with open_progress(console, num_steps=4, quiet=quiet) as progress:
        run(progress)
    return file.getvalue()


def run(progress: ProgressView) -> None:
    for done in range(11):
        progress.stage("warm-up", done, 10, f"loss {done}")
    progress.step(1, METRICS)
    progress.say("a [bold] word")


@pytest.mark.parametrize("terminal", [True, False])
def test_every_view_shows_the_step_and_where_its_time_went(terminal: bool) -> None:
    text = shown(terminal=terminal)
    for part in ("1/4", "1.25", "14.2", "0.5", "3.2k", "rollout 75%", "train 12%", "anything 12%", "a [bold] word"):
        assert part in text


@pytest.mark.parametrize("width", [40, 77, 78])
def test_a_narrow_terminal_cuts_no_number_and_no_bar(width: int) -> None:
    text = shown(terminal=True, width=width)
    row = next(line for line in reversed(text.splitlines()) if "1.25" in line)
    assert row.split()[:6] == ["1", "1.25", "14.2", "0.5", "3.2k", "2.00"]
    assert "…" not in row and ("█" * 18 in row) == (width == 78)


@pytest.mark.parametrize("terminal", [True, False])
def test_every_view_shows_the_time_that_is_left(terminal: bool) -> None:
    assert "6 s left" in shown(terminal=terminal)  # three steps of 2 s


def test_plain_lines_are_one_a_step_and_few_a_stage() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert sum(line.startswith("step") for line in text.splitlines()) == 1
    stages = [line for line in text.splitlines() if line.startswith("warm-up")]
    assert stages[0] == "warm-up 0/10 loss 0"
    assert stages[-1] == "warm-up 10/10 loss 10"
    assert len(stages) == 5


@pytest.mark.parametrize("terminal", [True, False])
def test_a_distillation_shows_the_distance_to_its_teacher_and_no_reward(terminal: bool) -> None:
    headline = algorithm_of(load_recipe("distill")).headline
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with open_progress(console, num_steps=4) as progress:
        progress.step(1, METRICS | {"actor/teacher_kl": 0.5, "actor/teacher_forward_kl": 0.125}, headline)
    assert "teacher KL" in file.getvalue() and "0.1250" in file.getvalue()
    assert "reward" not in file.getvalue() and "1.25 " not in file.getvalue()


def test_quiet_shows_nothing() -> None:
    assert shown(terminal=True, quiet=True) == ""


def test_a_step_with_nothing_known_is_shown_with_dashes() -> None:
    line = StepLine.of(7, {})
    assert line.shares == ()
    assert line.cells() == ("-", "-", "-", "-", "-")


@given(st.dictionaries(st.sampled_from(["rollout", "reward", "train", "weight_sync"]), st.floats(0, 1e6), min_size=1))
def test_shares_add_up_to_the_whole(times: dict[str, float]) -> None:
    shares = StepLine.of(1, {f"timing_s/{name}": value for name, value in times.items()}).shares
    assert sum(share for _, share in shares) == pytest.approx(1) or sum(times.values()) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (949.6, "950"), (3210, "3.2k"), (14000, "14k"), (1.3e6, "1.3M"), (math.nan, "-")]
)
def test_counts_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("first\nsecond", "first ..."),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("x" * 300, "x" * 200 + " ..."),
    ],
)
def test_a_text_of_any_kind_is_brief(text: str, shown: str) -> None:
    assert brief(text) == shown


@pytest.mark.parametrize(("value", "text"), [(45.2, "45 s"), (150, "2 min"), (9000, "2.5 h"), (math.nan, "-")])
def test_durations_are_readable(value: float, text: str) -> None:
    assert duration(value) == text


def test_a_notebook_has_one_display_for_all_runs_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, a comparison and an evaluation printed a line for each step."""
    monkeypatch.setattr("interlace.observe.open_progress.is_notebook", lambda: True)
    progress = open_progress(Console(quiet=True), num_steps=3)
    assert isinstance(progress, NotebookProgress)
    monkeypatch.setattr(progress, "_draw_state", lambda: None)
    for step in (1, 2, 3):
        progress.step(step, METRICS)
    assert "<svg" in progress.page()
    progress.step(1, METRICS)
    assert "<svg" not in progress.page() and "step 1/3" in progress.page(), "the curve of the next run begins"
