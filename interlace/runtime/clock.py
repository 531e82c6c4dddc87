"""Clocks: the source of time. All runtime code reads its clock, so the runtime also runs on a virtual clock."""

import asyncio
from typing import Protocol


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
