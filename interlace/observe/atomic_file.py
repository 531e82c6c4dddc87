"""Atomic writes of files: complete or absent, even if the process is killed or, with a sync, the power fails."""

import contextlib
import errno
import os
import threading
from pathlib import Path


def write_atomic(path: Path, text: str, *, synced: bool = False, mode: int = 0o666) -> None:
    """Writes all of the text, or leaves the existing file unchanged.

    Several processes may write one file at the same time; one of their texts is then in the file. synced: also if the
    power fails. mode: permissions of the file, from which the umask is taken.
    """
    temporary = path.with_name(f"{path.name}.{threading.get_native_id()}.tmp")  # one for each writer
    try:
        temporary.unlink(missing_ok=True)  # of a killed process whose thread had the same number
        temporary.touch(mode, exist_ok=False)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if synced:
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Waits until the file's content is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the folder's entries are on disk.

    Does nothing on Windows, which cannot open folders, and on network file systems that cannot sync one.
    """
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)
