"""Files of a replay: contents one behind another, in files that are never changed once they are full."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from interlace.core.config import Config
from interlace.core.errors import UserError

_FULL_BYTES = 16 << 20
"""A file that is larger takes nothing more."""
_SUFFIX = ".trajectories"


class FilePlace(Config):
    """Place of a content on disk."""

    file: int
    offset: int
    size: int


class ReplayFiles:
    """Contents on disk. A file is removed once nothing in it is needed."""

    def __init__(self, folder: Path) -> None:
        """folder: its own; files that are there are removed."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{_SUFFIX}"):
            path.unlink()
        self._num_needed: dict[int, int] = {}
        """Contents that are needed, by file."""
        self._sizes: dict[int, int] = {}
        self._open = 0
        """Number of the file that is written to next."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def write(self, content: bytes) -> FilePlace:
        """Writes a content."""
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
        """Reads a content. Raises UserError where the file is cut short."""
        with self._path(place.file).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.size)
        if len(content) < place.size:
            raise UserError(f"{self._path(place.file)} is cut short: resume from an earlier checkpoint.")
        return content

    def release(self, place: FilePlace) -> None:
        """Says that a content is not needed any more."""
        self._num_needed[place.file] -= 1
        if not self._num_needed[place.file]:
            self._remove(place.file)

    def link_to(self, folder: Path) -> None:
        """Puts all files into another folder as well, where they stay whatever happens here."""
        for number in self._num_needed:
            _put(self._path(number), folder / self._path(number).name)
        self._open += bool(self._sizes.get(self._open))  # what was linked must not grow

    def take_from(self, folder: Path, places: Sequence[FilePlace]) -> None:
        """Takes the files of these places over from a folder that link_to() filled, in place of all there is.

        Raises UserError where one is missing.
        """
        for number in [*self._num_needed]:
            self._remove(number)
        for place in places:
            if place.file not in self._num_needed:
                source = folder / self._path(place.file).name
                if not source.is_file():
                    raise UserError(f"{source} is missing: resume from an earlier checkpoint.")
                _put(source, self._path(place.file))
                self._sizes[place.file] = source.stat().st_size
            self._num_needed[place.file] = self._num_needed.get(place.file, 0) + 1
        self._open = max(self._num_needed, default=-1) + 1

    def _remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        self._num_needed.pop(number, None)
        self._sizes.pop(number, None)
        self._open += number == self._open

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"


def _put(source: Path, target: Path) -> None:
    """Gives a file, which does not change any more, a second name."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
