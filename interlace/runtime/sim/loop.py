"""asyncio on a virtual clock: if nothing is ready, time jumps to the next timer without waiting."""

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVarTuple

from interlace.core.errors import HangError, SimulationStoppedError

Args = TypeVarTuple("Args")


class _NoSelector(selectors.BaseSelector):
    """Selector that never waits. The base class requires one."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002
        return []

    def close(self) -> None:
        self._keys.clear()


class _Timer(asyncio.TimerHandle):
    """Timer with the interface of an alarm, so that the loop treats both alike."""

    _loop: "VirtualLoop"

    def done(self) -> bool:
        return self.cancelled()

    def set_result(self, _nothing: None) -> None:
        """Makes the timer ready: its time has come."""
        self._loop._ready.append(self)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic loop: callbacks run in the order in which they were scheduled, timers in order of time."""

    _ready: "deque[asyncio.Handle]"
    _scheduled: "list[tuple[float, int, _Timer | asyncio.Future[None]]]"
    """(when, number, timer or alarm). If several are due at once, the one that was set first runs first."""
    _stopping: bool
    get_debug = staticmethod(bool)
    """Returns False: nothing here is slow or blocks. A built-in, because every future and handle calls it."""

    def __init__(self, *, max_seconds: float = 1e9) -> None:
        """max_seconds: virtual time after which an endless run counts as a hang."""
        self.now_s = 0.0
        """Virtual seconds since the loop was made."""
        self._numbers = itertools.count()
        self._max_seconds = max_seconds
        self.on_stall: Callable[[], bool] = lambda: False
        """Called if nothing is ready and no timer is set. Returns True if it made something ready."""
        self.stop_at_s = math.inf
        """Real time, by time.monotonic(), at which the loop raises SimulationStoppedError."""
        super().__init__(_NoSelector())

    def time(self) -> float:
        return self.now_s

    # The base class's scheduling methods check for misuse and debug mode at each of a simulation's many callbacks.
    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def alarm(self, delay: float) -> "asyncio.Future[None]":
        """Returns a future that is done after `delay` seconds, or once it has a result: a sleep without a callback."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        heapq.heappush(self._scheduled, (self.now_s + delay, next(self._numbers), future))
        return future

    def cancel_and_close(self) -> None:
        """Cancels the tasks that an interrupted or stalled run left, and closes the loop."""
        self.on_stall = lambda: False
        left = asyncio.all_tasks(self)
        for task in left:
            task.cancel()
        if left:
            with suppress(HangError):  # a task that does not end: the run's own error matters more
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.close()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer is skipped when its time comes."""

    def _run_once(self) -> None:
        # Replaces the base class's turn, which queries a selector and the clock each time. Most turns of a simulation
        # run one callback, so this took a fifth of its time. It runs until the loop is stopped; ready callbacks then
        # stay ready.
        ready = self._ready
        while not self._stopping:
            if not ready:
                self._advance_time()
                continue
            handle = ready.popleft()
            if handle._cancelled:
                continue
            try:  # like the handle's own _run(), which costs another call
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except Exception as error:  # noqa: BLE001 - the loop's handler gets any exception
                self.call_exception_handler(
                    {"message": f"exception in callback {handle}", "exception": error, "handle": handle}
                )

    def _advance_time(self) -> None:
        """Advances to the next timer or alarm. If there is none, reports a stall."""
        timers, is_stalled = self._scheduled, True
        if time.monotonic() > self.stop_at_s:
            raise SimulationStoppedError("the simulation was stopped: its real time is over")
        while timers and (is_stalled or timers[0][0] <= self.now_s):
            when, _, due = heapq.heappop(timers)
            if due.done():
                continue
            if when > self.now_s:
                self.now_s = when
                if when > self._max_seconds:
                    raise HangError(f"the virtual clock passed {self._max_seconds:.0f} s")
            is_stalled = False
            due.set_result(None)
        if is_stalled and not self.on_stall():
            raise HangError("nothing is ready and nothing is timed on the virtual clock")


def virtual_loop() -> VirtualLoop:
    """Returns the running loop. Raises ValueError if it is not a virtual loop."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise ValueError(f"simulated work runs on a VirtualLoop, not on a {type(loop).__name__}")
    return loop


class VirtualClock:
    """Clock of a virtual loop, read several times in every operation."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._start_s = loop, loop.now_s

    def now(self) -> float:
        """Returns virtual seconds since this clock was made."""
        return self._loop.now_s - self._start_s

    async def sleep(self, seconds: float) -> None:
        await self._loop.alarm(seconds)
