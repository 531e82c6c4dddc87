"""A checkpoint records its run, model and step, and a run resumes from its own checkpoints only."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_identity import RunIdentity, check_changed_settings, write_settings

OWN = RunIdentity(run="a" * 32, model="tiny:micro")


def save(folder: Path, step: int, run: RunIdentity | None = OWN) -> Path:
    return Checkpoints(folder, keep=9, run=run).save(step, lambda path: (path / "w").touch() or None, num_bytes=1)


def newest(folder: Path) -> Path | None:
    return Checkpoints(folder, keep=9, run=OWN).newest_whole().path


def test_a_run_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    assert save(tmp_path, 4) == newest(tmp_path)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (RunIdentity(run="b" * 32, model="tiny:micro"), "belongs to another run"),
        (RunIdentity(run="a" * 32, model="tiny:base"), "holds another model"),
        (None, "does not record its run"),
    ],
)
def test_a_checkpoint_of_another_run_or_model_is_refused(
    tmp_path: Path, other: RunIdentity | None, sentence: str
) -> None:
    save(tmp_path, 4, other)
    with pytest.raises(UserError, match=sentence):
        newest(tmp_path)


def test_a_checkpoint_that_was_renamed_to_a_later_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 4).rename(tmp_path / "step_6")
    with pytest.raises(UserError, match="was written at step 4 and renamed"):
        newest(tmp_path)


def test_changed_settings_are_listed_with_the_verdict(tmp_path: Path) -> None:
    write_settings(tmp_path, {"steps": 4, "optimizer": {"lr": 1e-3}, "schedule": {"preset": "sync", "sync_every": 1}})
    changed = {"steps": 6, "optimizer": {"lr": 1e-3}, "schedule": {"preset": "sync", "sync_every": 1}}
    assert check_changed_settings(tmp_path, changed) == ["steps: 4 -> 6 (allowed)"]
    changed["optimizer"] = {"lr": 0.5}
    with pytest.raises(UserError, match=r"optimizer.lr: 0.001 -> 0.5 \(not allowed(.|\n)*steps: 4 -> 6 \(allowed\)"):
        check_changed_settings(tmp_path, changed)


def test_a_planner_may_have_changed_the_schedule(tmp_path: Path) -> None:
    write_settings(tmp_path, {"schedule": {"preset": "auto", "sync_every": 1}})
    assert check_changed_settings(tmp_path, {"schedule": {"preset": "auto", "sync_every": 2}})
