"""Serialization of samples: a line of JSON, then arrays. Reading executes no code from the file."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.payload import StoredSegments
from interlace.core.recovery import Cause
from interlace.core.runs import Runs
from interlace.core.types import FinishReason, Prompt, RewardResult, Sample, SampleKey, Segment

_RECORDS = {
    kind.__name__: kind for kind in (Sample, Prompt, Segment, RewardResult, EpisodeCounts, Message, ToolCall, ToolSpec)
}
_ENUMS: Mapping[str, type[Enum]] = {"cause": Cause, "finish": FinishReason}
_ENUM_TAGS = {kind: tag for tag, kind in _ENUMS.items()}
_TAG = "\x00"
"""Key that marks a JSON object as a value other than a mapping."""
OBJECT_BYTES = 64
"""Approximate memory of an object without its content, in bytes."""


def sample_to_bytes(sample: Sample) -> bytes:
    """Serializes a sample with all its arrays, bit for bit."""
    arrays: list[NDArray[np.generic]] = []
    line = json.dumps(_to_plain(sample, arrays)).encode() + b"\n"
    return b"".join([line, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def sample_from_bytes(content: bytes) -> Sample:
    """Reads the result of sample_to_bytes(). Raises ValueError for other bytes."""
    line, _, raw = content.partition(b"\n")
    found = _read_record(json.loads(line), _Arrays(raw))
    if not isinstance(found, Sample):
        raise ValueError("the bytes hold no sample")
    return found


def sample_nbytes(sample: Sample) -> int:
    """Returns the approximate memory of a sample, in bytes."""
    values = [value for record in (sample, *sample.segments) for value in vars(record).values()]
    values += [item for value in values if isinstance(value, Mapping) for item in value.values()]
    return sum([OBJECT_BYTES + (value.nbytes if isinstance(value, np.ndarray) else 0) for value in values])


def _to_plain(value: Any, arrays: list[NDArray[np.generic]]) -> Any:
    if value is None or isinstance(value, bool | int | float) or type(value) is str:
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_TAG: "array", "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, Runs):
        return {_TAG: "runs", "pieces": value.pieces}
    if type(value) in _ENUM_TAGS:
        return {_TAG: _ENUM_TAGS[type(value)], "value": value.value}
    if isinstance(value, SampleKey):
        return {_TAG: "key", "value": [value.gid, value.index]}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        # Computed fields are not arguments of the constructor.
        content = {each.name: _to_plain(getattr(value, each.name), arrays) for each in fields(value) if each.init}
        return {_TAG: type(value).__name__, **content}
    if isinstance(value, Mapping):
        return {_TAG: "mapping", "items": [[key, _to_plain(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple | list | StoredSegments):
        kind = "list" if isinstance(value, list) else "tuple"
        return {_TAG: kind, "items": [_to_plain(item, arrays) for item in value]}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a sample holds a {type(value).__name__}, which has no place in a file")


class _Arrays:
    """Arrays after the JSON line, in order."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._offset = raw, 0

    def take(self, dtype: str, shape: list[int]) -> NDArray[np.generic]:
        """Reads the next array into new memory."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        found = np.frombuffer(self._raw, kind, count, self._offset).reshape(shape).copy()
        self._offset += found.nbytes
        return found


def _read_record(value: Any, arrays: _Arrays) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.pop(_TAG)
    match kind:
        case "array":
            return arrays.take(value["dtype"], value["shape"])
        case "runs":
            return Runs([(number, count) for number, count in value["pieces"]])
        case "cause" | "finish":
            return _ENUMS[kind](value["value"])
        case "key":
            return SampleKey(*value["value"])
        case "mapping":
            return {key: _read_record(item, arrays) for key, item in value["items"]}
        case "tuple":
            return tuple(_read_record(item, arrays) for item in value["items"])
        case "list":
            return [_read_record(item, arrays) for item in value["items"]]
    return _RECORDS[kind](**{name: _read_record(item, arrays) for name, item in value.items()})
