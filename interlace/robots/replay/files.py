"""Append-only files of a replay buffer. A full file is never changed again."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from interlace.core.config import Config
from interlace.core.errors import UserError

_FULL_BYTES = 16 << 20
"""Size from which a file is full."""
_SUFFIX = ".trajectories"


class FilePlace(Config):
    """Location of a content on disk."""

    file: int
    offset: int
    size: int


class ReplayFiles:
    """Contents on disk. A file is deleted when all its contents have been released."""

    def __init__(self, folder: Path) -> None:
        """folder: directory of this object; existing files are deleted."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{_SUFFIX}"):
            path.unlink()
        self._num_needed: dict[int, int] = {}
        """Number of needed contents per file."""
        self._sizes: dict[int, int] = {}
        self._open = 0
        """Number of the file to append to."""

    def write(self, content: bytes) -> FilePlace:
        """Appends a content. Returns its location."""
        if self._sizes.get(self._open, 0) >= _FULL_BYTES:
            self._open += 1
        number = self._open
        place = FilePlace(file=number, offset=self._sizes.get(number, 0), size=len(content))
        with self._path(number).open("ab") as file:
            file.write(content)
        self._sizes[number] = place.offset + place.size
        self._num_needed[number] = self._num_needed.get(number, 0) + 1
        return place

    def read(self, place: FilePlace) -> bytes:
        """Reads a content. Raises UserError if the file is truncated."""
        with self._path(place.file).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.size)
        if len(content) < place.size:
            raise UserError(f"{self._path(place.file)} is cut short: resume from an earlier checkpoint.")
        return content

    def release(self, place: FilePlace) -> None:
        """Marks a content as no longer needed."""
        self._num_needed[place.file] -= 1
        if not self._num_needed[place.file]:
            self._remove_file(place.file)

    def link_to(self, folder: Path) -> None:
        """Links all files into another folder, which later changes here do not affect."""
        for number in self._num_needed:
            _link_file(self._path(number), folder / self._path(number).name)
        self._open += bool(self._sizes.get(self._open))  # linked files must not grow

    def take_from(self, folder: Path, places: Sequence[FilePlace]) -> None:
        """Replaces all files by the files of these places from a folder that link_to() filled.

        Raises UserError if a file is missing.
        """
        for number in [*self._num_needed]:
            self._remove_file(number)
        for place in places:
            if place.file not in self._num_needed:
                source = folder / self._path(place.file).name
                if not source.is_file():
                    raise UserError(f"{source} is missing: resume from an earlier checkpoint.")
                _link_file(source, self._path(place.file))
                self._sizes[place.file] = source.stat().st_size
            self._num_needed[place.file] = self._num_needed.get(place.file, 0) + 1
        self._open = max(self._num_needed, default=-1) + 1

    def _remove_file(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        self._num_needed.pop(number, None)
        self._sizes.pop(number, None)
        self._open += number == self._open

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"


def _link_file(source: Path, target: Path) -> None:
    """Hard-links a file that no longer changes, or copies it."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
