"""Time of an episode's own code, between its turns and named waits."""

import asyncio
import math
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from interlace.runtime.waits import Clock, WaitRegistry

T = TypeVar("T")


class CodeTime:
    """Tracks when an episode's own code runs, and limits the sum of these times.

    While the code runs, or awaits something outside the run, an operation is registered, so that no stall is declared
    and the wait-for graph names the episode. The time of turns and of simulators does not count for the limit: they
    wait for engines, environments and devices of the run.
    """

    def __init__(self, name: str, clock: Clock, waits: WaitRegistry, *, timeout_s: float) -> None:
        """name: name of the episode in the wait-for graph. timeout_s: limit of the code's time, in seconds."""
        self._name, self._clock, self._waits = name, clock, waits
        self._timeout_s = self._left_s = timeout_s
        self._deadline = asyncio.timeout(None)
        self._num_elsewhere = self._num_stops = 0
        """Numbers of all waits in progress that are registered elsewhere, and of those that stop the time."""
        self._operation: int | None = None
        self._is_open = False

    def begin(self) -> None:
        self._is_open = True
        self._register_wait()

    def end(self) -> None:
        self._is_open = False
        self._unregister_wait()

    def check_open(self) -> None:
        """Raises RuntimeError if the code has not started or has ended."""
        if not self._is_open:
            raise RuntimeError("the episode has ended; its session gives no more turns")

    async def limit(self, run: Awaitable[T]) -> T:
        """Awaits the episode within its time limit. TimeoutError if its code and tools take longer."""
        self._deadline = asyncio.timeout(None)
        try:
            async with self._deadline:
                self._restart_deadline()
                return await run
        except TimeoutError:
            if not self._deadline.expired():
                raise
            limit = f"{self._timeout_s:g} s (episode.timeout_s), without its turns and simulators"
            raise TimeoutError(f"the episode was not done within {limit}") from None

    @contextmanager
    def stop(self) -> Iterator[None]:
        """Stops the episode's time during a turn, or a wait for a simulator."""
        with self.exclude_wait():
            if not self._num_stops and (when := self._deadline.when()) is not None:
                self._left_s = when - asyncio.get_running_loop().time()
                if not self._deadline.expired():
                    self._deadline.reschedule(None)
            self._num_stops += 1
            try:
                yield
            finally:
                self._num_stops -= 1
                self._restart_deadline()

    @contextmanager
    def exclude_wait(self) -> Iterator[None]:
        """Ends the operation during a wait that is registered under another name."""
        self._num_elsewhere += 1
        self._unregister_wait()
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            if self._is_open and not self._num_elsewhere:
                self._register_wait()

    def _restart_deadline(self) -> None:
        if self._is_open and not self._num_stops and self._left_s < math.inf and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _register_wait(self) -> None:
        self._operation = self._waits.begin(self._name, "its own code", self._clock.now())

    def _unregister_wait(self) -> None:
        if self._operation is not None:
            self._waits.end(self._operation)
            self._operation = None
