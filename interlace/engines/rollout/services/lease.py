"""Lease of a server. A server outlives a killed run for some seconds, in which a resumed run can adopt it.

A guard process runs the server as long as a run is connected to the guard. The operating system ends the connection
with the run, even if the run is killed. The guard then listens at a socket file until a run connects or the lease has
ended. Only the user can enter the folder of the socket file.
"""

import contextlib
import fcntl
import os
import select
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

RECORDS = "rollout-*.json"
"""Pattern of the records of servers in the folder of a run's engines, by the number of the engine."""
POLL_S = 0.25
"""Seconds between two checks of the record, and between two attempts to connect to a guard."""
CONNECT_S = 2.0
"""Seconds in which a guard begins to listen after its run was killed."""
LOCK_S, LOCK_POLL_S = 1.0, 0.02
"""Seconds in which a process that checks whether a guard runs ends its lock, and between two attempts to lock."""
OWNER = "owner"
"""File in the private folder of a server that the run locks."""
NEW_S = 60.0
"""Age in seconds up to which a folder may be one whose run has not locked this file yet."""
_HELD: dict[Path, int] = {}
"""Handles of the files that this process has locked, by the private folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLease:
    """Files of one server, and the time for which it outlives its run."""

    seconds: float
    record: Path
    """File that describes the server, in the run's folder. The lease ends if it is removed or replaced, and no other
    record names the folder of the server."""
    folder: Path
    """Private folder of the server."""

    @property
    def socket_file(self) -> Path:
        """Returns the socket file at which the guard listens."""
        return self.folder / "lease"

    def lock(self, within_s: float = 0.0) -> int | None:
        """Locks the folder, which the guard does until its end. Returns a descriptor; None if the folder is locked.

        The lock ends with the descriptor. within_s: seconds for another process to end its lock. Raises OSError if the
        folder does not exist or cannot be locked.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            with contextlib.suppress(BlockingIOError):
                return _lock(self.folder, os.O_RDONLY)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(LOCK_POLL_S)

    def wait_for_owner(self) -> socket.socket | None:
        """Waits, in the guard, for a run that adopts the server. Returns its connection; None if the lease ends."""
        if not self.seconds:
            return None
        deadline_s = time.monotonic() + self.seconds
        self.socket_file.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket_file))
            listener.listen()
            listener.settimeout(POLL_S)
            while time.monotonic() < deadline_s and self._is_current():
                with contextlib.suppress(OSError):
                    owner, _ = listener.accept()
                    owner.settimeout(None)
                    owner.sendall(f"{os.getpid()}\n".encode())
                    self.socket_file.unlink(missing_ok=True)
                    return owner
        return None

    def connect(self, within_s: float = CONNECT_S) -> "AdoptedGuard | None":
        """Connects to the guard as the run that owns the server. Returns None if no guard waits for a run.

        within_s: seconds for the guard to begin to listen.
        """
        deadline_s = time.monotonic() + within_s
        while self.folder.is_dir():
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(CONNECT_S)
            with contextlib.suppress(OSError, ValueError):
                connection.connect(str(self.socket_file))
                return AdoptedGuard(connection, int(connection.recv(32)))
            connection.close()
            if time.monotonic() > deadline_s:
                return None
            time.sleep(POLL_S)
        return None

    def _is_current(self) -> bool:
        # Twice, because a record may get another name between the listing of the folder and the reading of the file.
        return any(find_record(self.record.parent, self.folder) for _ in range(2))


def hold_folder(folder: Path) -> None:
    """Marks the private folder of a server as used, until release_folder() or the end of this process.

    A guard locks the folder as well, but no guard runs before the start of the server and between two starts. Raises
    BlockingIOError if another process uses the folder.
    """
    release_folder(folder)
    try:
        _HELD[folder] = _lock(folder / OWNER, os.O_RDWR | os.O_CREAT)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def release_folder(folder: Path) -> None:
    """Ends the use of a private folder. Does nothing if this process does not use it."""
    if (handle := _HELD.pop(folder, None)) is not None:
        os.close(handle)


def remove_unused_folders(parent: Path, prefix: str) -> None:
    """Removes the private folders that neither a run nor a guard uses, such as after a kill before a server's start.

    parent: folder of the private folders. prefix: of their names. A folder without the file of hold_folder() may be
    another program's, and is only removed if it is empty.
    """
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:  # used, or of another user
            locks.callback(os.close, _lock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            if time.time() - folder.stat().st_mtime < NEW_S:
                continue
            if (folder / OWNER).exists():
                locks.callback(os.close, _lock(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW))
                remove_private_folder(folder)
            else:
                folder.rmdir()


def remove_private_folder(folder: Path) -> None:
    """Removes the private folder of a server, the file of hold_folder() last.

    remove_unused_folders() thus recognizes the remains of a removal that was interrupted. Errors are ignored.
    """
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if path.name != OWNER]:
            _remove(path)
        if all(path.name == OWNER for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _lock(path: Path, flags: int) -> int:
    """Locks a file or folder. Returns a handle, with which the lock ends. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def record_file(folder: Path, number: int) -> Path:
    """Returns the record of the server of an engine. folder: of the run's engines."""
    return folder / RECORDS.replace("*", str(number))


def read_number(record: Path) -> int | None:
    """Returns the number of the engine of a record. None for another file."""
    number = record.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() and record == record_file(record.parent, int(number)) else None


def find_record(engines: Path, private: Path) -> Path | None:
    """Returns the record that names the private folder of a server. None if no record does.

    engines: folder of the records of a run.
    """
    return next((record for record in engines.glob(RECORDS) if names_path(record, private)), None)


def names_path(record: Path, path: Path) -> bool:
    """Returns whether a record names a private folder or a log. False if the record cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return str(path) in record.read_text(encoding="utf-8")
    return False


class AdoptedGuard:
    """Guard that is no child of the run: of an adopted or detached server. It has the methods of a process in use."""

    returncode = None
    """A process that is not a child has no exit status."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """pid: of the guard; it stays valid while the guard keeps the connection open."""
        self.pid, self._connection = pid, connection
        self._poller = select.poll()  # select.select() fails for descriptors from 1024 on
        self._poller.register(connection, select.POLLIN)

    def poll(self) -> int | None:
        """Returns 0 if the guard has ended, else None."""
        return 0 if self._poller.poll(0) else None

    def wait(self) -> None:
        """Waits for the end of the guard, and closes the connection."""
        self._poller.poll()
        self._connection.close()
