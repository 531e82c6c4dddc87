"""Contents of samples in Ray's object store, for ranks on other machines than the controller.

A rank that does not share the controller's memory puts a content into the store of its node. Messages contain its key;
Ray's reference is passed separately, by calls of the rank's actor, because Ray counts it. A reader fetches the content
from the node that has it. The content is lost with the process that put it, which owns it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from interlace.core import payload
from interlace.core.errors import PayloadLostError
from interlace.core.payload import PayloadStore, Stored

T = TypeVar("T")


class RemoteContent(Stored[T]):
    """A value in the object store of a machine."""

    __slots__ = ("has_ended", "key", "ref")

    travels = True

    def __init__(self, key: str, ref: Any = None) -> None:
        """key: names the object across processes. ref: Ray's reference. If None, it was passed on, or follows."""
        super().__init__()
        self.key, self.has_ended = key, False
        self.ref = ref or _references.pop_taken(key)
        if self.ref is None:
            _references.missing.append(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if payload.is_sent_by_value(self):
            return Stored, (self.read(),)
        named = _named.get()
        if named is not None:
            named.append(self)
        return RemoteContent, (self.key,)

    @property
    def is_lost(self) -> bool:
        """True if the process that owns the value has ended."""
        return self.has_ended

    def _load_parts(self) -> Sequence[NDArray[np.uint8]]:
        try:
            return [np.array(part) for part in ray.get(self.ref)]  # copied: the store's memory is read-only
        except RayError as error:
            self.has_ended = True
            raise PayloadLostError(f"the content of a sample is lost: {error}") from error


class RemotePayloads(PayloadStore):
    """Writer of values into the object store of this machine."""

    def __init__(self) -> None:
        """Needs no folder."""

    def _keep(self, parts: Sequence[memoryview]) -> Stored[Any]:
        ref = ray.put([np.frombuffer(part, np.uint8) for part in parts])
        _references.kept[ref.hex()] = ref
        return RemoteContent(ref.hex(), ref)


class _References:
    """References of this process, by key, on their way from or to another process."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        """References of contents that this process put and whose receiver does not have them yet."""
        self.missing: list[RemoteContent[Any]] = []
        """Contents that arrived before their references."""
        self._taken: defaultdict[str, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, references: Mapping[str, Sequence[Any]]) -> None:
        """Accepts the references of contents that the next message names."""
        with self._lock:
            for key, (ref,) in references.items():
                self._taken[key].append(ref)

    def pop_taken(self, key: str) -> Any:
        """Returns the reference of a content of a message; None if it did not arrive."""
        with self._lock:
            found = self._taken.get(key)
            ref = found.pop() if found else None
            if found == []:
                del self._taken[key]
            return ref


_references = _References()
_named: ContextVar[list[RemoteContent[Any]] | None] = ContextVar("named", default=None)


@contextmanager
def collect_contents() -> Iterator[list[RemoteContent[Any]]]:
    """Collects the contents that are pickled inside."""
    found: list[RemoteContent[Any]] = []
    before = _named.set(found)
    try:
        yield found
    finally:
        _named.reset(before)


def take_missing() -> list[RemoteContent[Any]]:
    """Returns the contents that arrived without a reference since the last call."""
    found, _references.missing = _references.missing, []
    return found


def hand_over(keys: Sequence[str]) -> list[Any]:
    """Returns the references of contents that this process put. Their receiver holds them then."""
    return [_references.kept.pop(key) for key in keys]


take: Callable[[Mapping[str, Sequence[Any]]], None] = _references.take
