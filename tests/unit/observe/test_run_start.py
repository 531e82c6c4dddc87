"""The error that ends a run states how the run is continued, for the command and the Python interface."""

import errno
import os
from pathlib import Path

import pytest

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_start import explain_end


def advise(folder: RunFolder) -> str:
    return f"Continue {folder.name}."


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "mine").mkdir()
    return RunFolder(path=tmp_path / "mine")


def test_a_full_disk_is_explained(folder: RunFolder) -> None:
    full = pytest.raises(DiskFullError, match=r"mine is full.*Make room first. Continue mine\.")
    with full, explain_end(folder, advise, resume=False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_second_interrupt_is_explained(folder: RunFolder) -> None:
    stopped = pytest.raises(InterlaceError, match=r"stopped at once. Continue mine\.")
    with stopped, explain_end(folder, advise, resume=False):
        raise KeyboardInterrupt


def test_another_error_gets_a_note(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="lost") as caught, explain_end(folder, advise, resume=False):
        raise ValueError("lost")
    assert caught.value.__notes__ == ["Continue mine."]


@pytest.mark.parametrize("resume", [False, True])
def test_a_mistake_removes_a_new_run_alone(folder: RunFolder, resume: bool) -> None:
    with pytest.raises(UserError) as caught, explain_end(folder, advise, resume=resume):
        raise UserError("steps=0")
    assert folder.path.exists() == resume
    assert not hasattr(caught.value, "__notes__")
