"""A running job is found by its folder, and told from a dead one."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.live import LiveRun, is_supported, refuse_running, running_process
from interlace.observe.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no file locks")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def find_elsewhere(path: Path) -> int:
    """As another command would."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(running_process, (RunFolder(path=path),))


def test_a_running_job_is_found_while_it_runs(folder: RunFolder) -> None:
    with LiveRun(folder):
        assert find_elsewhere(folder.path) == os.getpid()
    assert not folder.process.exists()
    with pytest.raises(UserError, match=r"is not running: .*process.json is missing"):
        running_process(folder)


def test_a_run_that_is_being_trained_is_nobody_elses(folder: RunFolder) -> None:
    refuse_running(folder)
    with LiveRun(folder), pytest.raises(UserError, match=rf"is being trained by process {os.getpid()}.*--name"):
        refuse_running(folder)
    refuse_running(folder)


def test_a_process_that_was_killed_is_told_from_one_that_runs(folder: RunFolder) -> None:
    # Its number may belong to another program by now, here to this one.
    folder.process.write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    with pytest.raises(UserError, match=rf"process {os.getpid()} ended without removing .*--resume"):
        running_process(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', '{"pid": "x", "host": "y"}'])
def test_a_file_that_names_no_process_is_called_damaged(folder: RunFolder, text: str) -> None:
    folder.process.write_text(text)
    with pytest.raises(UserError, match=r"process.json does not say which process .* is damaged"):
        running_process(folder)


def test_a_job_on_another_machine_is_not_signalled(folder: RunFolder) -> None:
    folder.process.write_text(json.dumps({"pid": os.getpid(), "host": "elsewhere"}))
    with pytest.raises(UserError, match="runs on 'elsewhere'"):
        running_process(folder)
