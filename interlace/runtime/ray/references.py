"""References of objects in Ray's store, on their way between processes.

Messages contain the keys of the objects. Ray's references are passed separately, by calls of the rank's actor, because
Ray counts them: at the same time as a call that names objects, and after a reply that does. A worker that reads an
object waits for its reference.
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
        """References of objects of calls that have not arrived yet."""
        self._changed = threading.Condition()

    def keep(self, references: Named) -> None:
        """Holds the references of the objects that a reply names."""
        with self._changed:
            _add(self._kept, references)

    def take(self, references: Named) -> None:
        """Accepts the references of the objects that a call names, which may have arrived before them.

        If a call is cancelled before it is sent, its references stay until the process ends.
        """
        with self._changed:
            _add(self._taken, references)
            self.missing = [named for named in self.missing if not self._set_taken(named)]
            self._changed.notify_all()

    def hand_over(self, key: str) -> Any:
        """Returns the reference of an object that a reply named. Its receiver holds it then."""
        with self._changed:
            ref = _pop_first(self._kept, key)
        if ref is None:
            raise KeyError(f"no reference of {key} is kept here")
        return ref

    def find(self, named: Referenced) -> None:
        """Sets the reference of an object of a message, now or when it arrives."""
        with self._changed:
            if not self._set_taken(named):
                self.missing.append(named)

    def wait_for(self, named: Referenced) -> Any:
        """Returns the reference of an object. Waits until it arrives, if it follows the call that named the object."""
        with self._changed:
            self._changed.wait_for(lambda: named.ref is not None or not any(each is named for each in self.missing))
        return named.ref

    def _set_taken(self, named: Referenced) -> bool:
        """Sets the reference of an object if it has arrived. Returns whether it has."""
        named.ref = _pop_first(self._taken, named.key)
        return named.ref is not None


def _add(entries: defaultdict[str, list[Any]], references: Named) -> None:
    for key, refs in references.items():
        entries[key] += refs


def _pop_first(entries: defaultdict[str, list[Any]], key: str) -> Any:
    """Removes and returns a reference of an object; None if there is none."""
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
        found[named.key].append(REFERENCES.wait_for(named))


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
