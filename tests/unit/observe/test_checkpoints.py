"""A checkpoint is complete or absent, regardless of interruptions."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.atomic_file import sync_folder
from interlace.observe.checkpoints import Checkpoints


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "nested").mkdir()
        (folder / "nested" / "weights").write_text(text)

    return write


def read(folder: Path | None) -> str:
    assert folder is not None
    return (folder / "nested" / "weights").read_text()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 9, 10, 11):
        assert checkpoints.save(step, writes(str(step)), num_bytes=1) == tmp_path / f"step_{step}"
    assert checkpoints.steps() == [10, 11]
    assert read(checkpoints.latest()) == "11"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]


def test_the_checkpoint_of_the_start_is_kept_until_the_end_of_the_process(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(1, writes("1"), num_bytes=1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.keep_start(1)
    for step in (2, 3):
        checkpoints.save(step, writes(str(step)), num_bytes=1)
    assert checkpoints.steps() == [1, 3]
    checkpoints.keep_start(None)
    assert checkpoints.steps() == [3]


def test_nothing_is_there_before_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []


def test_a_step_is_written_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, writes("first"), num_bytes=1)
    checkpoints.save(3, writes("second"), num_bytes=1)
    assert read(checkpoints.latest()) == "first"


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writes("whole"), num_bytes=1)
    with pytest.raises(
        UserError, match=r"no space under .* step 2 \(step_1 is whole; .*it needs \d+ MiB, \d+ MiB are free"
    ):
        checkpoints.save(2, writes("never"), num_bytes=2**62)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert read(checkpoints.latest()) == "whole"


def test_a_disk_that_fills_up_meanwhile_leaves_the_previous_one(tmp_path: Path) -> None:
    def fills_the_disk(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writes("whole"), num_bytes=1)
    with pytest.raises(UserError, match="filled up while"):
        checkpoints.save(2, fills_the_disk, num_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_another_failure_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(folder))

    with pytest.raises(PermissionError):
        Checkpoints(tmp_path, keep=1).save(1, fails, num_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_previous_one_and_no_litter(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writes("whole"), num_bytes=1)
    code = (
        "import os, signal, sys; from pathlib import Path; from interlace.observe.checkpoints import Checkpoints\n"
        "def write(folder):\n"
        "    (folder / 'weights').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Checkpoints(Path(sys.argv[1]), keep=1).save(2, write, num_bytes=1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert checkpoints.steps() == [1]
    assert read(checkpoints.latest()) == "whole"
    checkpoints.save(2, writes("second"), num_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_kill_while_deleting_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writes("old"), num_bytes=1)
    delete = shutil.rmtree

    def is_killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", is_killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, writes("new"), num_bytes=1)
    monkeypatch.setattr(shutil, "rmtree", delete)
    assert checkpoints.steps() == [2]
    assert read(checkpoints.latest()) == "new"


def test_the_space_asked_for_is_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 50))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, writes("fits"), num_bytes=50)
    with pytest.raises(UserError, match="no space"):
        checkpoints.save(2, writes("does not"), num_bytes=51)


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Keep 1 or more"):
        Checkpoints(tmp_path, keep=0)


def test_the_best_is_kept_beside_the_newest_until_another_is_better(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        if step == 1:
            checkpoints.keep_best(step)
        checkpoints.save(step, writes(str(step)), num_bytes=1)
    assert checkpoints.steps() == [1, 3]
    checkpoints.keep_best(3)
    assert checkpoints.steps() == [3]


def test_the_earlier_best_is_kept_until_the_new_one_is_written(tmp_path: Path) -> None:
    def fails(_folder: Path) -> None:
        raise RuntimeError("a rank died")

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.keep_best(1)
    for step in (1, 2):
        checkpoints.save(step, writes(str(step)), num_bytes=1)
    checkpoints.keep_best(3)
    with pytest.raises(RuntimeError, match="a rank died"):
        checkpoints.save(3, fails, num_bytes=1)
    checkpoints.keep_start(None)  # the end of the process
    assert checkpoints.steps() == [1, 2]
    checkpoints.save(3, writes("3"), num_bytes=1)
    assert checkpoints.steps() == [3]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no file system that cannot sync a folder")
def test_a_file_system_that_cannot_sync_a_folder_is_no_error() -> None:
    sync_folder(Path("/proc/self"))  # fsync(2) returns EINVAL
