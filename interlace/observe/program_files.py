"""Files of a program's rows and models. They are in the folder of the runs, and may be moved with it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.core.types import JSON

DATA_FOLDER = "data"
"""Folder, in the folder of the runs, for a program's rows and models, so that a run can be resumed after its program
ended."""
_FILE = re.compile(rf"/.*/{DATA_FOLDER}/([0-9a-f]{{16}}/[\w.-]+\.jsonl|model-[0-9a-f]{{16}})")
"""Path of such a file. A part of it is a hash of the content."""


def follow_moved_files(settings: "Mapping[str, JSON]", runs: Path) -> "dict[str, JSON]":
    """Returns the settings of a run with the paths of its program's files in the folder of the runs.

    A file that is not in the folder keeps its path. runs: folder of the runs.
    """
    return {name: _follow(value, runs) for name, value in settings.items()}


def follow_moved_file(path: str, runs: Path) -> str:
    """Returns the path of a program's file in the folder of the runs; another path as it is."""
    found = _FILE.fullmatch(path)
    here = runs.resolve() / DATA_FOLDER / found[1] if found else None
    return str(here) if here and here.exists() else path


def _follow(value: "JSON", runs: Path) -> "JSON":
    if isinstance(value, Mapping):
        return follow_moved_files(value, runs)
    if isinstance(value, list):
        return [_follow(inner, runs) for inner in value]
    return follow_moved_file(value, runs) if isinstance(value, str) else value
