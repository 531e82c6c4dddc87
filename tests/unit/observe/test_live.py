"""A running job is found by its folder, a dead one is told apart, and signals reach whoever listens."""

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.live import TRACE_LIMIT_S, LiveRun, TraceFolder, refuse_running, running_process, trace_run
from interlace.observe.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


@pytest.fixture(autouse=True)
def _handler_as_before():  # type: ignore[no-untyped-def]
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


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


def test_signals_reach_the_listener_also_those_that_came_before(folder: RunFolder) -> None:
    heard: list[int] = []
    with LiveRun(folder) as live:
        ask()
        with live.heard_by(lambda: heard.append(1)):
            assert len(heard) == 1
            ask()
            assert len(heard) == 2
        ask()
    ask()  # one that comes late ends nothing
    assert len(heard) == 2


def test_a_thread_that_is_not_the_main_one_is_not_found(folder: RunFolder) -> None:
    def run() -> None:
        with LiveRun(folder):
            assert not folder.process.exists()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_what_a_killed_job_left_of_a_trace_is_removed(folder: RunFolder) -> None:
    traces = TraceFolder(root=folder.traces)
    traces.unfinished(2).mkdir(parents=True)
    traces.finished(1).mkdir()
    with LiveRun(folder):
        assert not traces.unfinished(2).exists() and traces.finished(1).exists()
        assert traces.next_number() == 2


@pytest.mark.parametrize("seconds", [0, -1, TRACE_LIMIT_S + 1])
def test_a_trace_has_a_sensible_length(folder: RunFolder, seconds: float) -> None:
    with pytest.raises(UserError, match="more than 0 and at most 60 seconds"):
        trace_run(folder, seconds, say=print)


def test_without_sigusr1_the_error_says_so(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGUSR1")
    with pytest.raises(UserError, match="which Windows has not"):
        trace_run(folder, 1, say=print)
    with LiveRun(folder):
        assert not folder.process.exists()
    monkeypatch.undo()
