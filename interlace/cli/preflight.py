"""Preparations of a command: checks that its output file can be written, and silences libraries."""

import os
from pathlib import Path

from interlace.core.errors import UserError

ROOT = Path("runs")
"""Folder of the runs."""


def hush_libraries() -> None:
    """Turns off the progress bars of transformers, which would break the lines of the live view.

    Sets an environment variable, which the library reads when a command imports it.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def writable(path: Path, option: str) -> Path:
    """Returns the path. Raises UserError if no file can be written there. option: name of the option, for messages."""
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}. Make it, or choose another file.")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder. Name a file, such as one in it.")
    beside = path.with_name(f"{path.name}.tmp")  # write_atomic() writes this file first
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}. Choose another file.") from None
    return path
