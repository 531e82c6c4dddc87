"""World models that a run publishes one after another, for environments in other processes. Imports no torch."""

import shutil
from collections.abc import Callable
from pathlib import Path

from interlace.observe.atomic_file import write_atomic

_CURRENT = "current"
_KEPT = 4
"""Newest models that are kept: an environment may be about to read the previous one."""


def newest_model(folder: Path) -> Path | None:
    """Returns the folder of the newest model; None before the first publication."""
    note = folder / _CURRENT
    return folder / note.read_text(encoding="utf-8") if note.is_file() else None


def publish_model(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    """Publishes the model of a step. write: writes the model into the given folder."""
    target = folder / f"step_{step:08d}"
    # Left over if the run was stopped after this step and resumed from an earlier one.
    shutil.rmtree(target, ignore_errors=True)
    write(target)
    write_atomic(folder / _CURRENT, target.name)
    for old in sorted(folder.glob("step_*"))[:-_KEPT]:
        shutil.rmtree(old)
