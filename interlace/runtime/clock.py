"""Clocks: the source of time. Everything in the runtime asks its clock, and so also runs on a virtual one."""

import asyncio
from typing import Protocol


class Clock(Protocol):
    """Seconds since some start; only differences mean something."""

    def now(self) -> float:
        """Returns seconds; safe to call from any thread."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's clock: real on asyncio's own loop, virtual on runtime/sim's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._start = loop.time()

    def now(self) -> float:
        """Seconds since this clock was made."""
        return self._loop.time() - self._start

    async def sleep(self, seconds: float) -> None:
        """Lets others run for that long."""
        await asyncio.sleep(seconds)
