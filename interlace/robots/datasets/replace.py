"""Replacement of a recorded data set by a new one."""

import shutil
from pathlib import Path

from interlace.core.errors import UserError
from interlace.robots.datasets.layout import INFO

CONTENT = ("data", "meta", "videos")
"""Folders of a LeRobotDataset."""


def is_recorded(folder: Path) -> bool:
    """Returns whether a folder contains a LeRobotDataset and nothing else."""
    return (folder / INFO).is_file() and all(path.name in CONTENT and path.is_dir() for path in folder.iterdir())


def check_replaceable(folder: Path) -> None:
    """Raises UserError if a folder has files and is not a recorded data set, or it or a part is a symbolic link."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link, so it is not overwritten. Name the folder itself, or a new one.")
    if wrong := [path for path in sorted(folder.iterdir()) if path.is_symlink()]:
        raise UserError(
            f"{wrong[0]} is a symbolic link, so the data set is not overwritten. Delete {folder} yourself, or name a "
            "new folder."
        )
    if is_recorded(folder) or not any(path.is_file() for path in folder.rglob("*")):
        return
    others = sorted(path.name for path in folder.iterdir() if path.name not in CONTENT or path.is_file())
    reason = f"it contains {others[0]!r}" if others else f"it has no {INFO}"
    raise UserError(
        f"{folder} is not a recorded data set ({reason}), so it is not overwritten. Delete it yourself, or name a new "
        "folder."
    )


def delete_content(folder: Path) -> None:
    """Deletes the content of a folder that check_replaceable() accepts. Raises UserError if it cannot be deleted."""
    try:
        for path in folder.iterdir():
            shutil.rmtree(path)
    except OSError as error:
        raise UserError(
            f"cannot replace the data set {folder}: {error.strerror or error}. Delete it yourself, or name a new "
            "folder."
        ) from error
