"""A recorded run goes the same way again on the virtual clock."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.jobs.replay import replay
from interlace.observe.run_folder import RunFolder
from interlace.schedule.presets import preset_names
from tests.support.training import run


def assert_replays(root: Path, name: str) -> None:
    again = replay(RunFolder(path=root / name))
    assert again.is_same, again.admission_difference + again.completion_difference
    assert len(again.admitted) >= 16 and len(again.completed) >= 64


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=async-colocated", "steps=8", "eval_every=2"],
        ["schedule=async-colocated", "steps=8", "schedule.min_hold=0.02", "checkpoint_every=1"],
        ["schedule=rollpacker"],
    ],
)
def test_a_run_is_admitted_and_completed_in_the_recorded_order(overrides: list[str], tmp_path: Path) -> None:
    run(tmp_path, "run", overrides)
    assert_replays(tmp_path, "run")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", preset_names())
def test_so_is_one_under_every_preset(schedule: str, tmp_path: Path) -> None:
    for seed in range(3):
        run(tmp_path, f"run-{seed}", [f"schedule={schedule}", f"seed={seed}", "steps=8", "eval_every=3"])
        assert_replays(tmp_path, f"run-{seed}")


def test_of_a_resumed_run_the_last_process_is_gone_through(tmp_path: Path) -> None:
    run(tmp_path, "run", ["schedule=async-colocated", "steps=6"], stop_after=2)
    run(tmp_path, "run", ["schedule=async-colocated", "steps=6"], resume=True)
    assert_replays(tmp_path, "run")


def test_a_run_that_was_stopped_or_killed_is_gone_through_as_far_as_it_came(tmp_path: Path) -> None:
    run(tmp_path, "run", ["schedule=async-colocated", "steps=8", "eval_every=1"], stop_after=6)
    assert_replays(tmp_path, "run")
    timeline = tmp_path / "run" / "timeline.json"
    text = timeline.read_text()
    timeline.write_text(text[: text.index('"name":"step 6"')].rpartition(",\n")[0])
    assert_replays(tmp_path, "run")


def test_a_run_that_goes_on_is_gone_through_as_far_as_its_timeline_came(tmp_path: Path) -> None:
    """Its samples are written at once, so those of later steps may be there."""
    run(tmp_path, "run", ["steps=8"])
    timeline = tmp_path / "run" / "timeline.json"
    text = timeline.read_text()
    timeline.write_text(text[: text.index('"name":"step 5"')].rpartition(",\n")[0])
    assert_replays(tmp_path, "run")


def test_a_resumed_run_whose_beginning_is_gone_says_so(tmp_path: Path) -> None:
    few = ["steps=3", "checkpoint_every=1", "keep_checkpoints=1"]
    run(tmp_path, "run", few, stop_after=1)
    run(tmp_path, "run", few, resume=True)
    with pytest.raises(UserError, match=r"step_1, where that began, is gone.*keep_checkpoints"):
        replay(RunFolder(path=tmp_path / "run"))


def test_a_run_without_a_timeline_says_so(tmp_path: Path) -> None:
    run(tmp_path, "run", ["logging.timeline=false", "steps=1"])
    with pytest.raises(UserError, match="has no timeline"):
        replay(RunFolder(path=tmp_path / "run"))
