"""Messages between the controller and a rank, over one socket: a pickle, and large arrays beside it, uncopied."""

import pickle
import struct
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from interlace.core.errors import InterlaceError

BESIDE_BYTES = 8192
"""Arrays from this size on travel beside the pickle; below it a copy is cheaper than one more read."""
CONSTRUCTION = 0
"""Number of the reply that says whether the worker could be made."""
UNAWAITED = -1
"""Number of a concurrent call; there is a reply only where it raised."""
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
    return [b"".join([_HEAD.pack(len(beside), len(body)), *sizes, body]), *beside]


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

    def _assemble(self) -> Generator[bytearray, None, None]:
        while True:
            head = bytearray(_HEAD.size)
            yield head
            num_beside, body_size = _HEAD.unpack(head)
            text = bytearray(num_beside * _SIZE.size + body_size)
            yield text
            # Writable memory of its own for each, so that arrays arrive as they were sent.
            beside = [bytearray(size) for (size,) in _SIZE.iter_unpack(text[: num_beside * _SIZE.size])]
            yield from beside
            self._done = pickle.loads(memoryview(text)[num_beside * _SIZE.size :], buffers=beside)
