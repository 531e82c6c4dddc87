"""A running job as other processes find it: a file in its folder says which process it is, SIGUSR1 asks for a trace.

The process keeps a lock on its file for as long as it lives, so a file that a killed process left behind is told from
one whose number went to another program.
"""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Self

from interlace.core.errors import InterlaceError, UserError
from interlace.observe.run_folder import RunFolder

TRACE_LIMIT_S = 60.0
"""A trace ends by itself after so many seconds: its size grows with every operation."""
POLL_S = 0.05
ANSWER_WITHIN_S = 60.0
"""For a trace to begin: the profiler is loaded by the first one."""
WRITTEN_WITHIN_S = 300.0


def is_supported() -> bool:
    """Whether this system has what a running job is found and asked by. Windows has neither."""
    return hasattr(signal, "SIGUSR1")


class LiveRun:
    """While its `with` block runs, others find this process by the run's folder and SIGUSR1 is heard.

    Only a main thread hears signals; elsewhere, and on Windows, nothing is written and nobody is found.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._listener: Callable[[], object] | None = None
        self._num_unheard = 0
        self._file: int | None = None

    @contextmanager
    def heard_by(self, toggle: Callable[[], object]) -> Iterator[None]:
        """toggle: called at each SIGUSR1, inside the signal handler; for those that came before, at once."""
        self._listener = toggle
        for _ in range(self._num_unheard):
            toggle()
        self._num_unheard = 0
        try:
            yield
        finally:
            self._listener = None

    def __enter__(self) -> Self:
        if is_supported() and current_thread() is main_thread():
            # First of all: without a handler the signal ends the process.
            signal.signal(signal.SIGUSR1, self._handle)
            self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._folder.process.unlink(missing_ok=True)
            os.close(self._file)
            # Not the default action: a signal that is on its way must not end a process that is nearly done.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _write(self) -> None:
        import fcntl

        TraceFolder(root=self._folder.traces).clear()
        temporary = self._folder.process.with_name(".process")
        self._file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.replace(self._folder.process)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._listener:
            self._listener()
        else:
            self._num_unheard += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFolder:
    """Where traces of a run go, numbered from 1: `profile/N`, hidden until it is complete."""

    root: Path

    def next_number(self) -> int:
        """Of the trace to come, or of the one that is being taken."""
        done = [int(path.name) for path in self.root.glob("[0-9]*") if path.name.isdigit()]
        return max(done, default=0) + 1

    def unfinished(self, number: int) -> Path:
        """Exists while the trace is being taken."""
        return self.root / f".{number}"

    def finished(self, number: int) -> Path:
        """Exists when all of it is there."""
        return self.root / str(number)

    def clear(self) -> None:
        """Removes what was not finished."""
        for unfinished in self.root.glob(".*"):
            shutil.rmtree(unfinished)


def trace_run(folder: RunFolder, seconds: float, *, say: Callable[[str], None]) -> Sequence[Path]:
    """Has a running job trace all its processes for so long, from outside. Returns its files, one a process.

    Raises UserError where the job does not run, or here, or a trace is being taken already; InterlaceError where it
    ended before it answered.
    """
    if not is_supported():
        raise UserError("a running job is traced by SIGUSR1, which Windows has not. Run it under Linux or macOS.")
    if not 0 < seconds <= TRACE_LIMIT_S:
        raise UserError(f"--seconds {seconds:g}: a trace takes more than 0 and at most {TRACE_LIMIT_S:.0f} seconds.")
    pid = running_process(folder)
    traces = TraceFolder(root=folder.traces)
    number = traces.next_number()
    if traces.unfinished(number).exists():
        raise UserError(
            f"run {folder.name!r} is being traced already. Wait for it, or end that trace: kill -USR1 {pid}."
        )
    os.kill(pid, signal.SIGUSR1)
    _wait_for([traces.unfinished(number), traces.finished(number)], folder, ANSWER_WITHIN_S)
    say(f"tracing process {pid} for {seconds:g} s")
    _wait_for([traces.finished(number)], folder, seconds, needed=False)
    if not traces.finished(number).exists():
        os.kill(running_process(folder), signal.SIGUSR1)
        _wait_for([traces.finished(number)], folder, WRITTEN_WITHIN_S)
    return sorted(traces.finished(number).iterdir())


def running_process(folder: RunFolder) -> int:
    """The process that trains a run now. Raises UserError where none does, or elsewhere."""
    try:
        told = json.loads(folder.process.read_text(encoding="utf-8"))
        pid, host = int(told["pid"]), str(told["host"])
    except FileNotFoundError:
        raise UserError(
            f"run {folder.name!r} is not running: {folder.process} is missing. Start it with `interlace train`."
        ) from None
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{folder.process} does not say which process trains run {folder.name!r}: it is damaged. Where none does, "
            "delete it."
        ) from None
    if host != socket.gethostname():
        raise UserError(f"run {folder.name!r} runs on {host!r}, and signals reach no other machine.")
    if _is_locked(folder.process):
        return pid
    raise UserError(
        f"run {folder.name!r} is not running: process {pid} ended without removing {folder.process}. "
        f"Go on with it: interlace train {folder.config} --name {folder.name} --resume"
    )


def refuse_running(folder: RunFolder) -> None:
    """Raises UserError where a process trains the run: two would write into the same files."""
    if is_supported() and folder.process.exists() and _is_locked(folder.process):
        raise UserError(
            f"run {folder.name!r} is being trained by process {running_process(folder)}. Wait for it, stop it with "
            "Ctrl-C, or give this one another name (--name)."
        )


def _is_locked(path: Path) -> bool:
    """Whether a living process keeps a lock on the file."""
    import fcntl

    file = os.open(path, os.O_RDONLY)  # the run may be somebody else's
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _wait_for(paths: Sequence[Path], folder: RunFolder, timeout_s: float, *, needed: bool = True) -> None:
    """Until one of them exists. Raises InterlaceError after timeout_s, where one is needed, or where the job ends."""
    deadline_s = time.monotonic() + timeout_s
    while not any(path.exists() for path in paths):
        if time.monotonic() > deadline_s:
            if needed:
                raise InterlaceError(f"run {folder.name!r} did not answer within {timeout_s:.0f} s.")
            return
        if not folder.process.exists() and not any(path.exists() for path in paths):
            raise InterlaceError(f"run {folder.name!r} ended before its trace was written.")
        time.sleep(POLL_S)
