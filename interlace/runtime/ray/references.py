"""References of objects in Ray's store, on their way between processes.

Messages contain the keys of the objects. Ray's references are passed separately, by calls of the rank's actor, because
Ray counts them: before a call that names objects, and after a reply that does.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias


class Referenced(Protocol):
    """Object in the store, as messages name it."""

    key: str
    """Name of the object across processes."""
    ref: Any
    """Ray's reference. None until it arrives."""


Named: TypeAlias = Mapping[str, list[Any]]
"""References by the keys of objects; as many as messages name the object. In lists, Ray does not fetch the objects."""


class _References:
    """References of this process on their way."""

    def __init__(self) -> None:
        self.missing: list[Referenced] = []
        """Objects that arrived before their references."""
        self._kept: defaultdict[str, list[Any]] = defaultdict(list)
        """References of objects that replies named and whose receiver does not have them yet."""
        self._taken: defaultdict[str, list[Any]] = defaultdict(list)
        """References of objects that the next call names."""
        self._lock = threading.Lock()

    def keep(self, references: Named) -> None:
        """Holds the references of the objects that a reply names."""
        self._add(self._kept, references)

    def take(self, references: Named) -> None:
        """Accepts the references of the objects that the next call names.

        If a call is cancelled before it is sent, its references stay until the process ends.
        """
        self._add(self._taken, references)

    def hand_over(self, key: str) -> Any:
        """Returns the reference of an object that a reply named. Its receiver holds it then."""
        ref = self._pop(self._kept, key)
        if ref is None:
            raise KeyError(f"no reference of {key} is kept here")
        return ref

    def find(self, named: Referenced) -> None:
        """Sets the reference of an object of a message, now or when it arrives."""
        named.ref = self._pop(self._taken, named.key)
        if named.ref is None:
            self.missing.append(named)

    def _add(self, entries: defaultdict[str, list[Any]], references: Named) -> None:
        with self._lock:
            for key, refs in references.items():
                entries[key] += refs

    def _pop(self, entries: defaultdict[str, list[Any]], key: str) -> Any:
        with self._lock:
            found = entries.pop(key, [])
            ref = found.pop() if found else None
            if found:
                entries[key] = found
            return ref


REFERENCES = _References()
_named: ContextVar[defaultdict[str, list[Any]] | None] = ContextVar("named", default=None)


def note_named(named: Referenced) -> None:
    """Notes that a message which is being pickled names an object."""
    if (found := _named.get()) is not None:
        found[named.key].append(named.ref)


def forget_named() -> None:
    """Forgets the noted objects, because the message is pickled again."""
    if (found := _named.get()) is not None:
        found.clear()


@contextmanager
def collect_named() -> Iterator[Named]:
    """Collects the references of the objects that are named by a message pickled inside."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    before = _named.set(found)
    try:
        yield found
    finally:
        _named.reset(before)


def take_missing() -> Sequence[Referenced]:
    """Returns the objects that arrived without a reference since the last call."""
    found, REFERENCES.missing = REFERENCES.missing, []
    return found
