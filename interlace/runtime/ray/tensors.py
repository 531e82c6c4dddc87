"""Transfer of weights through the object store: each table is stored once, and read by every rank that needs it."""

import dataclasses
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import ray

from interlace.runtime.process.tensors import PackedTensor, pack, unpack
from interlace.runtime.ray.references import REFERENCES, Referenced, note_named

if TYPE_CHECKING:
    from torch import Tensor

MIN_BYTES = 100_000
"""Smallest size in bytes of a stored table. A smaller table is cheaper inside the message."""


class _Table:
    """Content of a table in this process. Several messages may name the table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by a thread that fetches the table."""
        self._tensors: dict[str, Tensor] | None = None
        """None until the table is fetched."""

    def fetch(self, named: Referenced) -> "dict[str, Tensor]":
        """Returns the tensors. The first call fetches them from the store. named: an object that names the table."""
        with self._lock:
            if self._tensors is None:
                packed: dict[str, PackedTensor] = ray.get(REFERENCES.wait_for(named))
                self._tensors = {name: unpack(*entry) for name, entry in packed.items()}
            return self._tensors


_TABLES: "WeakValueDictionary[str, _Table]" = WeakValueDictionary()
"""Tables that an object of this process uses, by their keys."""
_LOCK = threading.Lock()


class StoredTensors(Mapping[str, "Tensor"]):
    """A read-only table of tensors in Ray's object store. It is fetched on first access, without a copy on one node."""

    def __init__(self, key: str, ref: Any = None) -> None:
        """key: names the object across processes. ref: Ray's reference. If None, it was passed on, or follows."""
        self.key, self.ref = key, ref
        self._table: _Table | None = None
        if ref is None:
            REFERENCES.find(self)

    @classmethod
    def put(cls, tensors: "Mapping[str, Tensor]") -> "StoredTensors":
        ref = ray.put({name: pack(tensor) for name, tensor in tensors.items()})
        return cls(ref.hex(), ref)

    def __getitem__(self, name: str) -> "Tensor":
        return self._fetch_table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch_table())

    def __len__(self) -> int:
        return len(self._fetch_table())

    def __reduce__(self) -> "tuple[type[StoredTensors], tuple[str]]":
        note_named(self)
        return StoredTensors, (self.key,)

    def _fetch_table(self) -> "dict[str, Tensor]":
        if self._table is None:
            with _LOCK:
                self._table = _TABLES.setdefault(self.key, _Table())
        return self._table.fetch(self)


def store_large(result: Any) -> Any:
    """Returns a record with its large tables of tensors in the store, and any other value unchanged.

    All fields of the record are searched. If its class defines `tensors_within`, only those fields are searched,
    including the records in them, recursively.
    """
    if _is_large_table(result):
        return StoredTensors.put(result)
    if isinstance(result, tuple):
        stored = tuple(store_large(entry) for entry in result)
        return result if all(new is old for new, old in zip(stored, result, strict=True)) else stored
    if not (dataclasses.is_dataclass(result) and not isinstance(result, type)):
        return result
    changed = {}
    for name in _list_fields(result):
        value = getattr(result, name)
        if _is_large_table(value) or hasattr(type(result), _DEEPER):
            new = store_large(value)
            changed.update({} if new is value else {name: new})
    return dataclasses.replace(result, **changed) if changed else result


_DEEPER = "tensors_within"
"""Class attribute of a record: names of the fields that may contain tables at any depth."""


def _list_fields(record: Any) -> Sequence[str]:
    named: Sequence[str] | None = getattr(type(record), _DEEPER, None)
    return [field.name for field in dataclasses.fields(record)] if named is None else named


def _is_large_table(value: Any) -> bool:
    # A process that has not loaded torch holds no tensors.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, Mapping) or isinstance(value, StoredTensors):
        return False
    if not all(isinstance(entry, torch.Tensor) for entry in value.values()):
        return False
    return sum(tensor.numel() * tensor.element_size() for tensor in value.values()) >= MIN_BYTES
