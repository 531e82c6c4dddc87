"""Files that are there whole or not at all, whatever ends the process that writes them, and after a power cut."""

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Writes all of the text, or leaves what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Returns once the file's content is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Returns once the folder's names are on disk. On Windows, whose folders cannot be opened, at once."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
