"""Contents of samples in memory that the processes of a machine share: one file per sample, and references to it.

The process that generates a sample writes its tokens, log-probs and text into a file (`PayloadStore.put_sample`).
Messages contain a reference (`StoredSegments`): sizes, versions, and the name of the file. A reader maps the file, so
it reads only the pages of the arrays that it uses. The controller owns the file, whether it wrote it or received its
reference from the producer, and removes it with its last reference. The file outlives a worker that wrote it. Files of
a dead process that no reference names are removed by remove_orphans().
"""

import contextlib
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from interlace.core.errors import PayloadLostError
from interlace.core.runs import Runs
from interlace.core.segment import Segment

T = TypeVar("T")
Pickled: TypeAlias = tuple[bytes, list[memoryview]]
"""Pickle of a value, and the arrays that it refers to."""
Dumps: TypeAlias = Callable[[object], Pickled]
N = TypeVar("N")
MIN_BYTES = 8192
"""Content of fewer bytes travels in the message: its copy is cheaper than a file."""
_ALIGNMENT = 64
_FREE_SHARE = 0.5
"""Share of the shared memory that payloads leave free for messages and libraries."""
_owned: set[str] = set()
"""Files that this process owns: it wrote them as the controller, or received their reference from their producer."""
_by_value: ContextVar[bool] = ContextVar("by_value", default=False)
_may_refer: ContextVar[bool] = ContextVar("may_refer", default=True)


@contextmanager
def pickling_by_value(is_wanted: bool, *, may_refer: bool = True) -> Iterator[None]:
    """Pickles contents instead of references inside, for a receiver that cannot read this machine's memory.

    may_refer: False if the message has no companion that passes references of contents on other machines.
    """
    by_value, refer = _by_value.set(is_wanted), _may_refer.set(may_refer)
    try:
        yield
    finally:
        _by_value.reset(by_value)
        _may_refer.reset(refer)


def is_sent_by_value(stored: "Stored[Any]") -> bool:
    """Returns whether a message that is being pickled contains the value itself."""
    return _by_value.get() and not (stored.travels and _may_refer.get())


class Stored(Generic[T]):
    """A value that stays where it was made. It is in a file, or in the memory of this process if it needs no file."""

    __slots__ = ("__weakref__", "_is_new", "_owner", "_parts", "_path", "_value")
    travels = False
    """True if a process on any machine of the run can read the value by its reference."""

    def __init__(self, value: T | None = None, path: str = "", parts: Sequence[int] = ()) -> None:
        """path: file with the value. parts: bytes of its parts: a pickle, then the arrays that it refers to."""
        self._value, self._path, self._parts = value, path, tuple(parts)
        self._is_new = False
        """True in the process that wrote the file. It owns the file until another process may receive this object."""
        self._owner = 0
        """Process that removes the file. 0 if it is another process than this one."""

    def __reduce__(self) -> tuple[Any, ...]:
        if is_sent_by_value(self) or not self._path:
            return Stored, (self.read(),)
        if self._is_new:
            self._owner = 0
        return _receive_value, (self._path, self._parts, self._is_new)

    def __del__(self) -> None:
        if self._owner and self._owner == os.getpid():  # a forked process has a copy, and is not the owner
            _owned.discard(self._path)
            with contextlib.suppress(OSError):
                os.remove(self._path)  # noqa: PTH107 - as for `open` in PayloadStore

    @property
    def is_lost(self) -> bool:
        """True if the value is in a file that does not exist any more."""
        return bool(self._path) and not os.path.exists(self._path)  # noqa: PTH110 - as for `open` in PayloadStore

    def read(self) -> T:
        """Returns the value; do not modify it. A file is mapped, once. Raises PayloadLostError if it does not exist."""
        if self._value is None and (parts := self._load_parts()):
            self._value = pickle.loads(parts[0].data, buffers=parts[1:])
        return cast("T", self._value)

    def _load_parts(self) -> Sequence[NDArray[np.uint8]]:
        """Returns a pickle and the arrays that it refers to; nothing if the value is in no file."""
        return _split_parts(_map_file(self._path), self._parts) if self._path else ()


Content: TypeAlias = tuple[tuple[Segment, ...], NDArray[np.uint8]]
"""Segments of a sample, and its text in UTF-8."""


class Sizes(NamedTuple):
    """Sizes of a sample's content."""

    num_segments: int
    num_tokens: int
    """Tokens of all segments."""
    num_sampled: int
    """Tokens that the policy sampled."""


class StoredSegments(Sequence[Segment]):
    """The segments of a sample in a file, with its text. Sizes and versions are known without the file."""

    __slots__ = ("content", "sizes", "versions")

    def __init__(self, content: Stored[Content], sizes: Sizes, versions: Runs[int]) -> None:
        self.content, self.sizes, self.versions = content, sizes, versions

    def __reduce__(self) -> tuple[Any, ...]:
        if is_sent_by_value(self.content):
            return tuple, (self.content.read()[0],)
        return StoredSegments, (self.content, self.sizes, self.versions)

    def __len__(self) -> int:
        return self.sizes.num_segments

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        return self.content.read()[0][index]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.content.read()[0])


def is_lost(segments: Sequence[Segment]) -> bool:
    """Returns whether the content of a sample with these segments cannot be read any more."""
    return isinstance(segments, StoredSegments) and segments.content.is_lost


class StoredColumn(Sequence[Any]):
    """One value per token of a stored response, read when it is used: its token ids or its log-probs."""

    __slots__ = ("_name", "segments")

    def __init__(self, segments: StoredSegments, name: str) -> None:
        """name: `token_ids` or `logprobs` of the only segment."""
        self.segments, self._name = segments, name

    def __len__(self) -> int:
        return self.segments.sizes.num_tokens

    def __getitem__(self, index: Any) -> Any:
        return self._read_values()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read_values().tolist())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.generic]:
        return np.array(self._read_values(), dtype, copy=copy)

    def _read_values(self) -> NDArray[np.generic]:
        found: NDArray[np.generic] = getattr(self.segments[0], self._name)
        return found


class StoredText:
    """The text of a sample, stored with its segments."""

    __slots__ = ("_segments",)

    def __init__(self, segments: StoredSegments) -> None:
        self._segments = segments

    def __reduce__(self) -> tuple[Any, ...]:
        is_sent_whole = is_sent_by_value(self._segments.content)
        return (str, (self.read(),)) if is_sent_whole else (StoredText, (self._segments,))

    def read(self) -> str:
        return str(self._segments.content.read()[1].tobytes(), "utf-8", "surrogatepass")


class TextField:
    """Field `text` of a record, which may be stored. As a descriptor, it is the field's default of a dataclass."""

    def __get__(self, record: object, owner: type) -> str:
        text: str | StoredText = "" if record is None else record.__dict__["text"]
        return text.read() if isinstance(text, StoredText) else text

    def __set__(self, record: object, text: str | StoredText) -> None:
        record.__dict__["text"] = text


def in_memory(values: Sequence[N]) -> Sequence[N]:
    """Returns the values of a stored column as a tuple, and other values unchanged."""
    return tuple(values) if isinstance(values, StoredColumn) else values


class PayloadStore:
    """Writer of values into a folder of shared memory."""

    _numbers = count()

    def __init__(self, folder: Path, *, is_owner: bool = False) -> None:
        """folder: in memory, and removed by its owner at the end of the run.

        is_owner: True in the controller, which owns the files that it writes. Otherwise the first process that receives
        the reference owns the file.
        """
        self._folder, self._is_owner = folder, is_owner

    def put(self, value: T, dumps: Dumps | None = None) -> Stored[T] | None:
        """Writes a value. dumps: replaces the plain way to pickle.

        Returns None if the value is small or of a class of the user's script, and if the memory has no room. It must
        then be sent whole.
        """
        body, arrays = (dumps or _pickle_value)(value)
        parts = [memoryview(body), *arrays]
        if sum(part.nbytes for part in parts) < MIN_BYTES or b"__main__" in body:
            return None
        return self._keep(parts)

    def put_sample(self, segments: Sequence[Segment], text: str) -> StoredSegments | None:
        """Writes the content of a sample. Returns None as put() does."""
        stored = self.put((tuple(segments), np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)))
        if stored is None:
            return None
        lengths = [len(segment.token_ids) for segment in segments]
        drawn = [
            size if segment.sampled is None else int(np.count_nonzero(segment.sampled))
            for segment, size in zip(segments, lengths, strict=True)
        ]
        versions = Runs([run for segment in segments for run in segment.versions.pieces])
        return StoredSegments(stored, Sizes(len(lengths), sum(lengths), sum(drawn)), versions)

    def _keep(self, parts: Sequence[memoryview]) -> Stored[Any] | None:
        """Writes a value: its pickle, and the arrays that it refers to. Returns None if the memory has no room."""
        path = f"{self._folder}/payload-{os.getpid()}-{next(self._numbers)}"
        if not self._write(parts, path):
            return None
        stored: Stored[Any] = Stored(None, path, [part.nbytes for part in parts])
        stored._is_new, stored._owner = not self._is_owner, os.getpid()
        if self._is_owner:
            _owned.add(path)  # a rank on another machine, whose files are removed, may have this process's number
        return stored

    def _write(self, parts: Sequence[memoryview], path: str) -> bool:
        """Returns False if the memory has no room."""
        try:
            memory = os.statvfs(self._folder)
            if memory.f_bavail < _FREE_SHARE * memory.f_blocks:
                return False
            file = open(path, "xb")  # noqa: PTH123, SIM115 - a Path takes longer than the write of a short response
        except OSError:  # also if a process with this number before has written the file, of a sample that may wait
            return False
        try:
            with file:
                for part in parts:
                    file.write(part)
                    file.write(padding(part.nbytes))
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(path)  # noqa: PTH107 - see above
            return False
        return True


def padding(size: int) -> bytes:
    """Returns the bytes to write after an array of `size` bytes, so that the next array is aligned."""
    return bytes(-size % _ALIGNMENT)


def _pickle_value(value: object) -> Pickled:
    arrays: list[memoryview] = []
    return pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: arrays.append(buffer.raw())), arrays


def _receive_value(path: str, parts: Sequence[int], is_new: bool) -> Stored[Any]:
    found: Stored[Any] = Stored(None, path, parts)
    if is_new:
        found._owner = os.getpid()
        _owned.add(path)
    return found


def remove_orphans(folder: Path, process: int | None) -> int:
    """Removes the files of a process that has ended, except those that this process owns. Returns their number.

    Call it after all messages of the process were received: a file may be in a message.
    """
    left = [path for path in folder.glob(f"payload-{process}-*") if str(path) not in _owned]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def _map_file(path: str) -> NDArray[np.uint8]:
    """Maps a file into memory, where writes are private. If the process has no further mapping, reads the file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise PayloadLostError(f"the content of a sample is lost: {error}") from error
    try:
        return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_COPY), np.uint8)
    except OSError:
        return np.fromfile(path, np.uint8)
    finally:
        os.close(file)


def _split_parts(content: NDArray[np.uint8], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(content[start : start + size])
        start += size + len(padding(size))
    return parts
