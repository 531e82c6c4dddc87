"""Lock on a run's folder: one process at a time trains a run, regardless of the command that started it."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from interlace.core.errors import UserError
from interlace.core.processes import read_start
from interlace.observe.run_folder import RunFolder, claim_name, latest_name


def is_supported() -> bool:
    """Returns True if this system has the file locks that this module needs. Windows has none."""
    return os.name == "posix"


class RunLock:
    """Lock on a run's folder, held during the `with` block. On Windows it does nothing.

    The file is locked in place: a new file that replaces it by a rename would not be the file that another process has
    locked. The system releases the lock when the process ends, however it ends.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Takes the lock. Raises UserError if another process has it, or the file system has no locks."""
        while is_supported() and self._file is None:
            self._file = self._take_lock()
        if self._file is not None:
            os.ftruncate(self._file, 0)
            holder = {"pid": os.getpid(), "start": read_start(os.getpid()), "host": socket.gethostname()}
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            if _is_file_at(self._file, self._folder.process):  # a folder that was set aside took its file along
                self._folder.process.unlink()
            os.close(self._file)
            self._file = None

    def _take_lock(self) -> int | None:
        """Returns the locked file; None if its holder removed it in the meantime, which makes the lock void."""
        import fcntl

        path = self._folder.process
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"cannot lock the run: {path} cannot be opened ({error.strerror}).") from error
        with ExitStack() as unless_held:
            unless_held.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"run {self._folder.name!r} is being trained by {self._describe_holder()}. Wait for it, stop it "
                    "with Ctrl-C, or give this one another name (--name)."
                ) from None
            except OSError as error:
                raise UserError(
                    f"cannot lock {path}: {error.strerror}. Without file locks two processes could train one run and "
                    "mix their files: start in a folder on a file system that has them."
                ) from error
            if not _is_file_at(file, path):
                return None
            unless_held.pop_all()
        return file

    def _describe_holder(self) -> str:
        holder = _read_holder(self._folder)  # None if it has only just started
        return f"process {holder[0]} on {holder[1]}" if holder else "another process"


def _is_file_at(file: int, path: Path) -> bool:
    """Returns whether an open file is the one at a path."""
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())


def _read_holder(folder: RunFolder) -> tuple[int, str, str] | None:
    """Returns number, host and start time of the process that holds a run; None if the lock's file names none."""
    try:
        holder = json.loads(folder.process.read_text(encoding="utf-8"))
        return int(holder["pid"]), str(holder["host"]), str(holder.get("start", ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_held(folder: RunFolder) -> bool | None:
    """Returns whether the process that holds the run exists; None if no process holds it.

    A process on another host counts as existing, because this host cannot see it.
    """
    holder = _read_holder(folder)
    if holder is None:
        return None
    pid, host, start = holder
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process of another user
    return read_start(pid) in ("", start) or not start  # else another process has the number of the one that ended


def open_run(root: Path, name: str | None, stem: str, *, overwrite: bool, held: ExitStack) -> RunFolder:
    """Creates a new run's folder, and keeps its lock in `held`. Raises the errors of RunFolder.create() and RunLock.

    name: if None, the first free name of `stem`. If a run is replaced, it is locked before its folder is set aside, and
    taken back at the end of `held` if the new run has trained no step. A folder without files is taken over.
    """
    if name is None:
        name, overwrite = claim_name(root, stem), True
    replaced = RunFolder.named(root, name)
    if overwrite and replaced.config.exists():
        with RunLock(replaced):
            replaced.set_aside()
    folder = RunFolder.create(root, name, overwrite=overwrite or replaced.has_no_files)
    held.enter_context(RunLock(folder))
    held.callback(folder.end_replacement)
    return folder


def resume_run(root: Path, name: str | None, stem: str, *, held: ExitStack) -> RunFolder:
    """Finds the folder of a run to continue, and keeps its lock in `held`, before the caller reads files in it.

    name: if None, the newest run whose name was made from `stem`. Raises the errors of RunFolder.resume() and RunLock.
    """
    folder = RunFolder.resume(root, latest_name(root, stem) if name is None else name)
    held.enter_context(RunLock(folder))
    return folder
