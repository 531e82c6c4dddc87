"""Swaps of weights that engines have not made yet."""

import itertools
from bisect import bisect_left
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.dispatch import Load
from interlace.schedule.loads import Loads


class Engine(Protocol):
    """An engine of a pool, as this module uses it."""

    load: Load
    """Number and expected tokens of its jobs."""
    number: int
    """Number in the order of creation."""


E = TypeVar("E", bound=Engine)


class OpenEngines(Generic[E]):
    """Engines of a pool that start new requests, in the order of creation.

    The list is kept up to date by changes of single engines: a cluster has thousands of them, and each dispatches again
    at a publication.
    """

    def __init__(self) -> None:
        self.drivers: list[E] = []
        self.loads = Loads()
        """Load of each of them."""

    def update(self, driver: E, *, is_open: bool) -> None:
        """Records whether an engine starts new requests."""
        place, was_open = self._find_position(driver)
        if is_open and not was_open:
            self.drivers.insert(place, driver)
            self.loads.add(driver.number, driver.load)
        elif was_open and not is_open:
            del self.drivers[place]
            self.loads.remove(driver.number)

    def find_place(self, driver: E) -> int | None:
        """Returns the index of an engine in `drivers`; None if it starts no requests."""
        place, is_open = self._find_position(driver)
        return place if is_open else None

    def _find_position(self, driver: E) -> tuple[int, bool]:
        """Returns the index that an engine has or would have, and whether it is among the engines."""
        place = bisect_left(self.drivers, driver.number, key=attrgetter("number"))
        return place, place < len(self.drivers) and self.drivers[place] is driver


class PendingSwaps(Generic[E]):
    """Engines with pending weights or queued requests, and the signal for tasks that wait for a version."""

    def __init__(self, waits: WaitRegistry) -> None:
        self.num = 0
        """Number of engines with pending weights."""
        self.open = OpenEngines[E]()
        self.queues: dict[E, None] = {}
        """Engines whose queued requests wait for their swap: few, even on a cluster with thousands of engines."""
        self._numbers = itertools.count()
        self.changed = Signal(waits)
        """Fires when an engine has swapped or left."""

    def number_engine(self) -> int:
        return next(self._numbers)

    def finish(self) -> None:
        """Records that an engine serves its pending weights."""
        self.num -= 1
        self.changed.fire()
