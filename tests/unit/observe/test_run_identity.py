"""A checkpoint records its run, model and step, and a run resumes from its own checkpoints only."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.types import JSON
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


def test_a_function_of_the_program_may_have_a_new_name(tmp_path: Path) -> None:
    def settings(name: str) -> dict[str, JSON]:
        return {"reward": {"name": name, "parts": [{"name": name, "weight": 1.0}]}}

    write_settings(tmp_path, settings("given:function_0"))
    lines = check_changed_settings(tmp_path, settings("given:function_1"), program_names="given:")
    assert len(lines) == 2 and all(line.endswith("(allowed)") for line in lines)
    with pytest.raises(UserError, match=r"reward.parts.0.weight: 1.0 -> 2.0 \(not allowed"):
        changed: dict[str, JSON] = {"reward": {"name": "given:function_1", "parts": [{"name": "a", "weight": 2.0}]}}
        check_changed_settings(tmp_path, changed, program_names="given:")


def test_a_planner_may_have_changed_the_schedule(tmp_path: Path) -> None:
    write_settings(tmp_path, {"schedule": {"preset": "auto", "sync_every": 1}})
    assert check_changed_settings(tmp_path, {"schedule": {"preset": "auto", "sync_every": 2}})
