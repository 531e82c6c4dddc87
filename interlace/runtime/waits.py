"""Registry of all waits: the waiting component, the awaited event, and the start. A hang can thus be diagnosed."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar


class Clock(Protocol):
    """Source of time in seconds since an arbitrary start. Only differences are meaningful."""

    def now(self) -> float:
        """Returns seconds. Safe to call from any thread."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's clock: real on asyncio's own loop, virtual on runtime/sim's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._start = loop.time()

    def now(self) -> float:
        """Returns seconds since this clock was made."""
        return self._loop.time() - self._start

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


T = TypeVar("T")


Wait = tuple[str, str, float]
"""A current wait or operation: component, event or operation, start time. A tuple, because every call makes one."""


class WaitRegistry:
    """The edges of the wait-for graph, and the operations that run on workers."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._waits: dict[int, Wait] = {}
        self._operations: dict[int, Wait] = {}
        self._pauses: set[int] = set()
        """Tokens of the operations in which nothing works."""
        self._next = 0
        self.progress = 0
        """Counter that grows whenever a wait or an operation ends."""

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
        """Operations that run outside the controller. While there is one, the run does not hang."""
        return len(self._operations)

    @property
    def num_working(self) -> int:
        """Operations without the pauses. While there is one, nothing is stalled."""
        return len(self._operations) - len(self._pauses)

    def begin(self, who: str, what: str, since_s: float) -> int:
        """Registers an operation outside the controller that runs from now on. Returns the token for end()."""
        self._next += 1
        self._operations[self._next] = (who, what, since_s)
        return self._next

    def end(self, token: int) -> None:
        """Ends the operation of a begin(), by its token."""
        del self._operations[token]
        self._pauses.discard(token)
        self.progress += 1

    @contextmanager
    def operation(self, *, who: str, what: str, is_pause: bool = False) -> Iterator[None]:
        """Registers the block as an operation outside the controller, such as the start of a worker or a file write.

        is_pause: True for a wait until the next attempt at something. The rest of the run may stall meanwhile.
        """
        token = self.begin(who, what, self.clock.now())
        if is_pause:
            self._pauses.add(token)
        try:
            yield
        finally:
            self.end(token)

    def longest(self) -> str:
        """Returns the longest-running operation, or the longest wait if none runs. Empty if there are neither."""
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
    """Signal that wakes its waiters. They re-check their condition, because a signal does not identify the change."""

    def __init__(self, waits: WaitRegistry) -> None:
        self._waits = waits
        self._futures: list[asyncio.Future[None]] = []

    def wait(self, *, who: str, what: str) -> Coroutine[Any, Any, None]:
        """Waits until the next fire()."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return self._waits.wait_for(future, who=who, what=what)

    def fire(self) -> None:
        """Wakes all current waiters."""
        if not self._futures:
            return
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
