"""Atomic writes of files: complete or absent, even if the process is killed or the power fails."""

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Writes all of the text, or leaves the existing file unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Waits until the file's content is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the folder's entries are on disk. Does nothing on Windows, which cannot open folders."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
