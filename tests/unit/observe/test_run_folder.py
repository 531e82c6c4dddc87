"""A run's folder is never shared, and never overwritten by accident."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder, claim_name, default_name, latest_name, set_timeline_aside
from interlace.observe.run_logs import RunLogs


class Settings(Config):
    zeta: int = 1
    alpha: tuple[float, ...] = (0.9, 0.95)
    text: str = "größer"


def test_a_name_that_is_taken_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a")
    with pytest.raises(UserError, match=r"'a' exists already.*--resume.*--overwrite.*--name"):
        RunFolder.create(tmp_path, "a")


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    old = RunFolder.create(tmp_path, "a")
    old.write_config(Settings())
    old.metrics.write_text("{}\n")
    new = RunFolder.create(tmp_path, "a", overwrite=True)
    assert not new.metrics.exists()
    assert not new.config.exists()
    assert new.samples.is_dir()


@pytest.mark.parametrize("other", ["notes.txt", "config.yaml"])
def test_overwriting_spares_a_folder_that_is_no_run(tmp_path: Path, other: str) -> None:
    (tmp_path / "thesis" / "checkpoints").mkdir(parents=True)
    (tmp_path / "thesis" / "final.tex").write_text("years of work")
    (tmp_path / "thesis" / other).write_text("site_name: thesis")
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.create(tmp_path, "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "final.tex").exists()


def test_a_run_that_cannot_be_deleted_is_not_replaced(tmp_path: Path) -> None:
    elsewhere = RunFolder.create(tmp_path, "elsewhere")
    elsewhere.write_config(Settings())
    (tmp_path / "a").symlink_to(elsewhere.path)
    with pytest.raises(UserError, match=r"cannot replace the run .*/a: .*symbolic link.*--name"):
        RunFolder.create(tmp_path, "a", overwrite=True)
    assert elsewhere.config.exists()


def test_overwriting_replaces_a_run_that_died_before_its_config(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a")
    assert RunFolder.create(tmp_path, "a", overwrite=True).checkpoints.is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", "-flag", "a b", "a" * 300])
def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot name a folder"):
        RunFolder.create(tmp_path, name, overwrite=True)


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run 'a' to resume"):
        RunFolder.resume(tmp_path, "a")
    RunFolder.create(tmp_path, "a").write_config(Settings())
    assert RunFolder.resume(tmp_path, "a").name == "a"


def test_resuming_a_run_whose_folders_cannot_be_made_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.write_config(Settings())
    run.samples.rmdir()
    run.samples.write_text("in its place")
    with pytest.raises(UserError, match=r"cannot make the run folder .*samples: File exists"):
        RunFolder.resume(tmp_path, "a")


def test_config_comes_back_and_keeps_the_order_of_its_fields(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.write_config(Settings(zeta=5))
    assert Settings.parse(yaml.safe_load(run.config.read_text())) == Settings(zeta=5)
    assert run.config.read_text().startswith("zeta: 5\nalpha:")


def test_a_disk_that_fills_up_leaves_the_earlier_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, open_real = RunFolder.create(tmp_path, "a"), Path.open
    run.write_config(Settings(zeta=5))

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith("config.yaml"):
            open_real(path, *args, **kwargs).close()  # which empties it
            path = Path("/dev/full")
        return open_real(path, *args, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_full)
        with pytest.raises(UserError, match=r"cannot write .*No space left"):
            run.write_config(Settings(zeta=6))
    assert Settings.parse(yaml.safe_load(run.config.read_text())) == Settings(zeta=5)
    assert [path.name for path in run.path.glob("*.tmp")] == []


def test_truncation_drops_later_metrics_and_samples(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    for step in range(1, 6):
        (run.samples / f"step_{step:06d}.jsonl").write_text("")
    run.advice.write_text("{}")
    assert RunLogs(run).return_to(3, None) == []
    assert not run.advice.exists(), "suggestions are for the steps before"
    assert run.metrics.read_text().count("\n") == 3
    assert sorted(path.name for path in run.samples.iterdir()) == [f"step_00000{step}.jsonl" for step in (1, 2, 3)]


def test_the_timelines_of_earlier_processes_are_kept(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    for text in ("first", "second", "third"):
        set_timeline_aside(run)
        run.timeline.write_text(text)
    kept = {path.name: path.read_text() for path in run.path.glob("timeline*")}
    assert kept == {"timeline-1.json": "first", "timeline-2.json": "second", "timeline.json": "third"}


def test_a_deleted_timeline_leaves_the_later_ones_in_place(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "quickstart")
    (run.path / "timeline-2.json").write_text("second")
    run.timeline.write_text("third")
    set_timeline_aside(run)
    assert (run.path / "timeline-2.json").read_text() == "second"
    assert (run.path / "timeline-3.json").read_text() == "third"


def test_names_that_are_claimed_at_once_differ(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = [*pool.map(lambda _: claim_name(tmp_path / "runs", "quick"), range(16))]
    assert len(set(names)) == 16 and "quick" in names
    assert RunFolder.create(tmp_path / "runs", names[0], overwrite=True).samples.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make a run folder"):
        claim_name(tmp_path / "file", "quick")


def test_default_names_count_up_and_the_latest_is_found(tmp_path: Path) -> None:
    assert default_name(tmp_path / "runs", "quick") == "quick"
    for expected in ("quick", "quick-2", "quick-3"):
        assert default_name(tmp_path, "quick") == expected
        RunFolder.create(tmp_path, expected)
    RunFolder.create(tmp_path, "quick-start")
    RunFolder.create(tmp_path, "quick-10").config.touch()
    assert default_name(tmp_path, "quick") == "quick-11"
    assert claim_name(tmp_path, "quick") == "quick-11"  # as a command that has not written its configuration yet
    assert latest_name(tmp_path, "quick") == "quick-10"
    with pytest.raises(UserError, match="no run of 'slow'"):
        latest_name(tmp_path, "slow")


def test_a_root_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot make the run folder.*{os.sep}file"):
        RunFolder.create(tmp_path / "file", "a")


def test_a_config_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.config.mkdir()
    with pytest.raises(UserError, match=f"cannot write .*a{os.sep}config.yaml: Is a directory"):
        run.write_config(Config())
