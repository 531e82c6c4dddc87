"""Messages between the controller and a rank, over one socket: a pickle, followed by large arrays without a copy."""

import copyreg
import io
import pickle
import struct
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import InterlaceError
from interlace.core.payload import Dumps, Pickled, padding, pickling_by_value
from interlace.runtime.process.shared import SharedArrays, SharedSpan
from interlace.runtime.process.tensors import tensor_reducers

BESIDE_BYTES = 8192
"""Arrays of at least this size are sent outside the pickle; for smaller ones a copy is cheaper than another read."""
CONSTRUCTION = 0
"""Number of the reply that reports whether the worker could be constructed."""
UNAWAITED = -1
"""Number of a concurrent call; it gets a reply only if it raises."""
LAST = -2
"""Number of the message that ends the worker. A controller that dies does not send it."""
SHARED_BYTES = 1 << 18
"""Bytes of a message's arrays from which shared memory carries them, if both ends are on one machine."""
OnBuffer: TypeAlias = Callable[[pickle.PickleBuffer], bool]
_STAGE_BYTES = 1 << 16
_HEAD = struct.Struct("<IQ")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operation to run."""

    number: int
    """Number of the call on this rank, from 1."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Reply to a call: its result or its error."""

    number: int
    value: Any = None
    error: InterlaceError | None = None
    ran_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of the operation, on the clock of the rank's process. Not set if it raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """A message whose arrays are in shared memory."""

    body: bytes
    spans: list[SharedSpan]
    made: str


def encode(
    message: Call | Reply | _Shared,
    shared: SharedArrays | None = None,
    dumps: Dumps | None = None,
    *,
    by_value: bool = False,
) -> list[bytes | memoryview]:
    """Returns the parts to write, in order. dumps: replaces the plain way to pickle.

    shared: memory that the receiver shares. If None, the receiver may be on another machine. The message then has
    contents of samples in place of references, as with `by_value`, which also copies contents of other machines.
    """
    with pickling_by_value(by_value or shared is None, may_refer=not by_value):
        body, beside = (dumps or plain_dumps)(message)
    if shared and sum(raw.nbytes for raw in beside) >= SHARED_BYTES and (found := shared.share(beside)):
        return encode(_Shared(body=body, spans=found[0], made=found[1]))
    sizes = [_SIZE.pack(raw.nbytes) for raw in beside]
    parts: list[bytes | memoryview] = [b"".join([_HEAD.pack(len(beside), len(body)), *sizes, body])]
    for raw in beside:
        parts += [raw, padding(raw.nbytes)]
    return parts


def plain_dumps(message: object) -> Pickled:
    """Returns a pickle, and separately the contents of large arrays and tensors."""

    def dump(on_buffer: OnBuffer) -> bytes:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=on_buffer)
        # A process that has not loaded torch holds no tensors.
        tensors = tensor_reducers() if "torch" in sys.modules else {}
        pickler.dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce_array, **tensors}
        pickler.dump(message)
        return file.getvalue()

    return with_buffers(dump)


def _reduce_array(array: NDArray[Any]) -> tuple[Any, ...]:
    """Reduces an array for a pickle. numpy's own way takes a fifth of the transfer time of a sample with few tokens."""
    flags = array.flags
    if array.ndim == 1 and array.strides == (0,) and array.size > 1:  # one value for all tokens, such as an advantage
        return np.broadcast_to, (array[0], array.shape)
    # Dates, durations and records of them have no buffer.
    is_plain = not array.dtype.hasobject and array.dtype.kind not in "mMV"
    if array.ndim != 1 or not 0 < array.nbytes < BESIDE_BYTES or not is_plain or not flags.c_contiguous:
        return array.__reduce_ex__(5)  # type: ignore[return-value]
    return np.frombuffer, (bytearray(array) if flags.writeable else bytes(array), array.dtype)


def with_buffers(dump: Callable[[OnBuffer], bytes]) -> Pickled:
    """Pickles with `dump`. Its callback decides for each array whether the content is stored in the pickle."""
    beside: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE_BYTES:
            return True
        beside.append(raw)
        return False

    return dump(in_band), beside


class Assembler:
    """Assembler of messages. One read can contain several small ones; large arrays are received into their own memory.

    Receive bytes into `space`, then call received() with their number.
    """

    def __init__(self, shared: SharedArrays | None = None) -> None:
        self._shared = shared
        self._whole: list[Call | Reply] = []
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._parts = self._assemble_messages()
        self._part = memoryview(next(self._parts))
        self.space = self._stage

    def received(self, count: int) -> list[Call | Reply]:
        """Consumes `count` filled bytes of `space`. Returns the messages that they complete."""
        if self.space is self._stage:
            self._place_content(self._stage[:count])
        else:
            self._fill_space(count)
        self.space = self._part if len(self._part) >= len(self._stage) else self._stage
        return self.take_whole()

    def take_whole(self) -> list[Call | Reply]:
        """Returns the complete messages before the one that received() could not read."""
        whole, self._whole = self._whole, []
        return whole

    def _place_content(self, content: memoryview) -> None:
        while content:
            count = min(len(content), len(self._part))
            self._part[:count] = content[:count]
            content = content[count:]
            self._fill_space(count)

    def _fill_space(self, count: int) -> None:
        self._part = self._part[count:]
        if not self._part:
            self._part = memoryview(next(self._parts))

    def _assemble_messages(self) -> Generator[bytearray | memoryview, None, None]:
        while True:
            head = bytearray(_HEAD.size)
            yield head
            num_beside, body_size = _HEAD.unpack(head)
            text = bytearray(num_beside * _SIZE.size + body_size)
            yield text
            sizes = [size for (size,) in _SIZE.iter_unpack(text[: num_beside * _SIZE.size])]
            # One block for all arrays of a message, so that it takes few reads. It is writable and not zeroed first.
            ends = list(accumulate(size + len(padding(size)) for size in sizes))
            block = np.empty(ends[-1] if ends else 0, np.uint8)
            if num_beside:
                yield block.data
            beside = [block[start:][:size] for start, size in zip([0, *ends], sizes, strict=False)]
            self._whole.append(
                self._open_message(pickle.loads(memoryview(text)[num_beside * _SIZE.size :], buffers=beside))
            )

    def _open_message(self, message: Any) -> Call | Reply:
        if isinstance(message, _Shared) and self._shared:
            message = pickle.loads(message.body, buffers=self._shared.attach(message.spans, message.made))
        found: Call | Reply = message
        return found
