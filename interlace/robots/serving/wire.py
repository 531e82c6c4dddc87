"""Messages between a robot and the policy server: maps in msgpack, with numpy arrays encoded as by openpi's client.

An array is a map of `__ndarray__`, `data`, `dtype` and `shape`; no message contains code or a pickle.
"""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError, first_line

Value: TypeAlias = "None | bool | int | float | str | NDArray[np.generic] | list[Value] | Mapping[str, Value]"
Message: TypeAlias = Mapping[str, Value]
ARRAY, NUMBER, DATA, DTYPE, SHAPE = b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape"
"""Keys of an encoded array or number."""
KINDS = "biuf"
"""Kinds of numpy types that a message may contain: truth values, integers and floating-point numbers."""
MOST_AXES = 5


class RequestError(UserError):
    """A robot's message cannot be used. The server answers with the text, and the connection stays open."""


def pack(message: Message) -> bytes:
    """Encodes a message."""
    data: bytes = import_msgpack().packb(message, default=_encode_array)
    return data


def unpack(data: bytes) -> Message:
    """Decodes a message. Raises RequestError if it is damaged, is not a map, or contains other types."""
    try:
        found = import_msgpack().unpackb(data, object_hook=_decode_array)
    except RequestError:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack raises many kinds, all for damaged bytes
        raise RequestError(f"the message is not a map in msgpack: {first_line(error)}.") from None
    if not isinstance(found, dict):
        raise RequestError(f"the message is of type {type(found).__name__}: send a map of names and arrays.")
    if odd := [key for key in found if not isinstance(key, str)]:
        raise RequestError(f"the message has the key {odd[0]!r}: keys are texts.")
    return found


def check_length(data: bytes, most: int) -> None:
    """Raises RequestError for a message of more than `most` bytes."""
    if len(data) > most:
        raise RequestError(
            f"the message has {len(data)} bytes, and the server takes {most}. Send smaller pictures, or an "
            "intervention in parts."
        )


def import_msgpack() -> ModuleType:
    """Imports msgpack. Raises UserError if it is missing."""
    try:
        import msgpack
    except ImportError:
        raise UserError("the policy server needs msgpack: pip install 'interlace[robot-edge]'.") from None
    found: ModuleType = msgpack
    return found


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
        return {ARRAY: True, DATA: value.tobytes(), DTYPE: value.dtype.str, SHAPE: value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in KINDS:
        return {NUMBER: True, DATA: value.item(), DTYPE: value.dtype.str}
    raise TypeError(f"a message contains {type(value).__name__}, which is not sent")


def _decode_array(value: dict[object, object]) -> object:
    if ARRAY not in value and NUMBER not in value:
        return value
    kind = _read_type(value.get(DTYPE))
    if NUMBER in value:
        number = value.get(DATA)
        if not isinstance(number, (bool, int, float)):
            raise RequestError(f"a number is encoded as {type(number).__name__}.")
        try:
            return kind.type(number)
        except (OverflowError, ValueError):
            raise RequestError(f"the number {number!r} does not fit {kind}.") from None
    data, shape = value.get(DATA), value.get(SHAPE)
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise RequestError(f"an array needs `data` in bytes and a `shape` of at most {MOST_AXES} sizes.")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"an array has the shape {shape!r}: sizes are whole numbers.")
    if math.prod(shape) * kind.itemsize != len(data):
        raise RequestError(f"an array of shape {shape} and type {kind} has {len(data)} bytes of data.")
    return np.frombuffer(data, kind).reshape(shape)


def _read_type(name: object) -> np.dtype[np.generic]:
    try:
        found = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        found = None
    if found is None or found.kind not in KINDS or found.subdtype or found.names:
        raise RequestError(f"an array has the type {name!r}: send truth values, integers or floating-point numbers.")
    return found
