"""Large arrays between processes of one machine. They lie in shared memory, and messages contain only their names."""

import bisect
import contextlib
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interlace.core.payload import padding

_MEMORY = Path("/dev/shm")
_PREFIX = "interlace-"
_MAX_PARTS = 512
"""Parts of one write; operating systems allow 1,024."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpan:
    """Location of an array in a shared segment."""

    segment: str
    offset: int
    size: int


class SharedFolder:
    """A folder in memory, named after this process. Its file lock marks the process as alive; a kill releases it.

    Containers may share the memory and number their processes on their own, so a number in a name proves nothing.
    """

    def __init__(self, memory: Path, prefix: str = _PREFIX) -> None:
        """Makes the folder PREFIXPROCESS-NAME, and removes those that killed processes left in the same memory."""
        import fcntl  # does not exist on Windows, which has no such memory either

        remove_unlocked_folders(memory, prefix)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}{os.getpid()}-", dir=memory))
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))  # other processes see the folder only once it is locked

    def remove(self) -> None:
        # Rename it first: a process that is about to be killed then adds no file while the folder is removed.
        hidden = self.path.with_name(f".{self.path.name}-removed")
        with contextlib.suppress(OSError):
            self.path.rename(hidden)
        for folder in (hidden, self.path):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(self._lock)


def make_shared_folder() -> SharedFolder | None:
    """Makes a folder, for the caller to remove. Returns None if this machine's shared memory is not a folder."""
    return SharedFolder(_MEMORY) if _MEMORY.is_dir() else None


def find_folders(process: int) -> list[Path]:
    """Returns the folders of a process in this machine's shared memory."""
    return [*_MEMORY.glob(f"{_PREFIX}{process}-*"), *_MEMORY.glob(f".{_PREFIX}{process}-*-removed")]


def remove_unlocked_folders(memory: Path = _MEMORY, prefix: str = _PREFIX) -> None:
    """Removes the folders of ended processes whose names begin with the prefix."""
    for left in [*memory.glob(f"{prefix}*"), *memory.glob(f".{prefix}*-removed")]:
        remove_if_left(left)


def remove_if_left(folder: Path) -> None:
    """Removes the folder of an ended process. Does nothing if its process lives."""
    import fcntl

    with contextlib.suppress(OSError):  # already removed, owned by another user, or its process lives
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # any user may put a pipe there
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def write_all(write: Callable[[Sequence[memoryview]], int], parts: Sequence[bytes | memoryview]) -> None:
    """Writes all parts with a writer that may write less than it was given."""
    left = [memoryview(part) for part in parts if len(part)]
    start = 0
    while start < len(left):
        written = write(left[start : start + _MAX_PARTS])
        while start < len(left) and written >= left[start].nbytes:
            written -= left[start].nbytes
            start += 1
        if written:
            left[start] = left[start][written:]


class SharedArrays:
    """One process's view of a folder in memory that processes of a machine share. Each segment is a file in it.

    The controller forwards arrays: it names an array that arrived in a segment instead of copying it. The segment is
    removed when no part of it is used any more. Arrays are therefore read-only in the controller and after forwarding.
    Other arrays belong to the rank and are copied on write.
    """

    def __init__(self, folder: Path, *, passes_on: bool) -> None:
        """passes_on: True in the controller."""
        self.folder, self._passes_on = folder, passes_on
        self._numbers = count()
        self._starts: list[int] = []
        self._known: dict[int, tuple[int, str]] = {}

    def share(self, arrays: Sequence[memoryview]) -> tuple[list[SharedSpan], str] | None:
        """Returns the arrays' spans, and the name of the segment made for them ('' if none was needed).

        Returns None if memory does not suffice.
        """
        known = [self._find_span(array) for array in arrays]
        new = [array for array, span in zip(arrays, known, strict=True) if span is None]
        if not new:
            return [span for span in known if span], ""
        name = f"{os.getpid()}-{next(self._numbers)}"
        try:
            self._write_file(name, new)
        except OSError:
            self.remove(name)
            return None
        spans, offset = [], 0
        for array, span in zip(arrays, known, strict=True):
            spans.append(span or SharedSpan(segment=name, offset=offset, size=array.nbytes))
            offset += 0 if span else array.nbytes + len(padding(array.nbytes))
        return spans, name

    def attach(self, spans: Sequence[SharedSpan], made: str) -> list[NDArray[np.uint8]]:
        """Maps the arrays. made: the segment made for this message, which its receiver removes."""
        segments = {name: self._map(name) for name in {span.segment: None for span in spans}}
        if made and not self._passes_on:
            self.remove(made)
        return [segments[span.segment][span.offset : span.offset + span.size] for span in spans]

    def remove(self, name: str) -> None:
        """Removes a segment. Its memory is freed once no process maps it."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).unlink()

    def _write_file(self, name: str, arrays: Sequence[memoryview]) -> None:
        file = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            write_all(lambda parts: os.writev(file, parts), [part for a in arrays for part in (a, padding(a.nbytes))])
        finally:
            os.close(file)

    def _map(self, name: str) -> NDArray[np.uint8]:
        file = os.open(self.folder / name, os.O_RDONLY)
        try:
            mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ if self._passes_on else mmap.ACCESS_COPY)
        finally:
            os.close(file)
        whole = np.frombuffer(mapped, np.uint8)
        if self._passes_on:
            start = _find_address(whole)
            bisect.insort(self._starts, start)
            self._known[start] = (whole.nbytes, name)
            # Attached to the array: a mapping reports its end when its addresses may already belong to another.
            weakref.finalize(whole, self._forget, start, name)
        return whole

    def _forget(self, start: int, name: str) -> None:
        self._starts.remove(start)
        del self._known[start]
        self.remove(name)

    def _find_span(self, array: memoryview) -> SharedSpan | None:
        starts = [*self._starts]  # another thread may release a segment meanwhile, but never one that contains `array`
        start = _find_address(np.frombuffer(array, np.uint8)) if starts else 0
        place = bisect.bisect_right(starts, start) - 1
        size, name = self._known.get(starts[place], (0, "")) if place >= 0 else (0, "")
        inside = size and start + array.nbytes <= starts[place] + size
        return SharedSpan(segment=name, offset=start - starts[place], size=array.nbytes) if inside else None


def _find_address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
