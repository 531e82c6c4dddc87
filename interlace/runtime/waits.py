"""Every wait is registered: who, on what, since when. What hangs can then be named instead of guessed."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from interlace.runtime.clock import Clock

T = TypeVar("T")


Wait = tuple[str, str, float]
"""One wait, or one operation, that goes on now: who, what, since when. A bare tuple, for every call makes one."""


class WaitRegistry:
    """The edges of the wait-for graph, and how many operations are out (running on a worker)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._waits: dict[int, Wait] = {}
        self._operations: dict[int, Wait] = {}
        self._next = 0
        self.progress = 0
        """Grows whenever a wait or an operation ends."""

    async def wait_for(self, awaitable: Awaitable[T], *, who: str, what: str) -> T:
        """Awaits, registered for as long as it takes."""
        self._next += 1
        token = self._next
        self._waits[token] = (who, what, self.clock.now())
        try:
            return await awaitable
        finally:
            del self._waits[token]
            self.progress += 1

    @property
    def num_running(self) -> int:
        """Operations that go on outside the controller now; while there is one, nothing is stalled."""
        return len(self._operations)

    def begin(self, who: str, what: str, since_s: float) -> int:
        """Notes that something goes on outside the controller from now on. Returns the token for end()."""
        self._next += 1
        self._operations[self._next] = (who, what, since_s)
        return self._next

    def end(self, token: int) -> None:
        """Ends the operation of a begin(), by its token."""
        del self._operations[token]
        self.progress += 1

    @contextmanager
    def operation(self, *, who: str, what: str) -> Iterator[None]:
        """Notes that something goes on outside the controller in the block: a worker is started, a file is written."""
        token = self.begin(who, what, self.clock.now())
        try:
            yield
        finally:
            self.end(token)

    def longest(self) -> str:
        """Returns the operation that goes on for longest; where none does, the longest wait. Empty where nothing is."""
        entries = [*self._operations.values()] or [*self._waits.values()]
        if not entries:
            return ""
        who, what, since_s = min(entries, key=lambda entry: entry[2])
        return f"{who} {'runs' if self._operations else 'waits for'} {what} since {self.clock.now() - since_s:.0f} s"

    def graph(self) -> str:
        """Returns the wait-for graph as lines, oldest first."""
        now = self.clock.now()
        running = [f"  {who} runs {what} since {now - at_s:.1f} s" for who, what, at_s in self._operations.values()]
        waiting = [f"  {who} waits for {what} since {now - at_s:.1f} s" for who, what, at_s in self._waits.values()]
        return "\n".join([f"{len(running)} operations running, {len(waiting)} waits:", *running, *waiting])


class Signal:
    """Signal that wakes the waiters. A wait re-checks its condition: a signal says that something changed, not what."""

    def __init__(self, waits: WaitRegistry) -> None:
        self._waits = waits
        self._futures: list[asyncio.Future[None]] = []

    def wait(self, *, who: str, what: str) -> Coroutine[Any, Any, None]:
        """Waits until the next fire()."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return self._waits.wait_for(future, who=who, what=what)

    def fire(self) -> None:
        """Wakes all who wait now."""
        if not self._futures:
            return
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
