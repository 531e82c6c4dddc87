"""The process that trains a run, as other commands find it: a locked file in the run's folder says which one it is.

The process keeps a lock on its file for as long as it lives, so a file that a killed process left behind is told from
one whose number went to another program.
"""

import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder


def is_supported() -> bool:
    """Says whether this system has the file locks that a running job is found by. Windows has none."""
    return os.name == "posix"


class LiveRun:
    """A run that this process trains: while the `with` block runs, other commands find the process by its folder.

    On Windows nothing is written, and no process is found.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: int | None = None

    def __enter__(self) -> Self:
        if is_supported():
            self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._folder.process.unlink(missing_ok=True)
            os.close(self._file)

    def _write(self) -> None:
        import fcntl

        temporary = self._folder.process.with_name(".process")
        self._file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.replace(self._folder.process)


def running_process(folder: RunFolder) -> int:
    """Returns the process that trains a run now. Raises UserError where none does, or elsewhere."""
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
        raise UserError(f"run {folder.name!r} runs on {host!r}, which can be asked there only.")
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
