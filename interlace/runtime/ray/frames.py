"""Messages between the controller and a rank, over one socket: a pickle, and large arrays beside it, uncopied."""

import pickle
import struct
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from ray import cloudpickle

from interlace.core.errors import InterlaceError

BESIDE_BYTES = 8192
"""Arrays from this size on travel beside the pickle; below it a copy is cheaper than one more read."""
CONSTRUCTION = 0
"""Number of the reply that says whether the worker could be made."""
UNAWAITED = -1
"""Number of a concurrent call; there is a reply only where it raised."""
_ALIGNMENT = 64
_HEAD = struct.Struct("<IQ")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operation to run."""

    number: int
    """Of the call, on this rank, from 1."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came of it."""

    number: int
    value: Any = None
    error: InterlaceError | None = None


def encode(message: Call | Reply) -> list[bytes | memoryview]:
    """What to write, in order. Classes of the user's own script are pickled by value, which plain pickle cannot."""
    beside: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= BESIDE_BYTES:
            beside.append(raw)
        return raw.nbytes < BESIDE_BYTES

    body: bytes = cloudpickle.dumps(message, protocol=5, buffer_callback=in_band)
    sizes = [_SIZE.pack(raw.nbytes) for raw in beside]
    parts: list[bytes | memoryview] = [b"".join([_HEAD.pack(len(beside), len(body)), *sizes, body])]
    for raw in beside:
        parts += [raw, bytes(_padding(raw.nbytes))]
    return parts


def _padding(size: int) -> int:
    """Bytes after an array, so that the next one is aligned wherever it arrives."""
    return -size % _ALIGNMENT


class Assembler:
    """Puts messages together. Bytes are received straight into `space`, the memory that they belong in."""

    def __init__(self) -> None:
        self._done: Call | Reply | None = None
        self._parts = self._assemble()
        self.space = memoryview(next(self._parts))

    def received(self, count: int) -> Call | Reply | None:
        """So many bytes of `space` were filled. Returns the message that is whole with them, if one is."""
        self.space = self.space[count:]
        if self.space:
            return None
        self._done = None
        self.space = memoryview(next(self._parts))
        return self._done

    def _assemble(self) -> Generator[bytearray | memoryview, None, None]:
        while True:
            head = bytearray(_HEAD.size)
            yield head
            num_beside, body_size = _HEAD.unpack(head)
            text = bytearray(num_beside * _SIZE.size + body_size)
            yield text
            sizes = [size for (size,) in _SIZE.iter_unpack(text[: num_beside * _SIZE.size])]
            # One block for all arrays of a message, so that it takes few reads; not zeroed first, and writable.
            block = np.empty(sum(size + _padding(size) for size in sizes), np.uint8)
            if num_beside:
                yield block.data
            ends = list(accumulate(size + _padding(size) for size in sizes))
            beside = [block[end - size - _padding(size) :][:size] for end, size in zip(ends, sizes, strict=True)]
            self._done = pickle.loads(memoryview(text)[num_beside * _SIZE.size :], buffers=beside)
