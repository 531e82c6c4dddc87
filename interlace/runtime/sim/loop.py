"""asyncio on a virtual clock: when nothing is ready, time jumps to the next timer instead of being waited for."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from interlace.core.errors import HangError


class _JumpingSelector(selectors.BaseSelector):
    """Never blocks: a wait for a timer moves the clock, a wait for nothing is a stall."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.jump: Callable[[float | None], None] = lambda _timeout: None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.jump(timeout)
        return []

    def close(self) -> None:
        self._keys.clear()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: callbacks run in the order in which they were scheduled, timers in order of time."""

    def __init__(self, *, max_seconds: float = 1e9) -> None:
        """max_seconds: virtual time at which a run that goes on for ever is called a hang."""
        self._virtual_s = 0.0
        self._max_seconds = max_seconds
        self.on_stall: Callable[[], bool] = lambda: False
        """Asked where nothing is ready and nothing is timed; True if it made something ready."""
        selector = _JumpingSelector()
        selector.jump = self._jump
        super().__init__(selector)
        # The base loop treats timers within its clock's resolution as due; virtual time has no jitter to forgive.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            if not self.on_stall():
                raise HangError("nothing is ready and nothing is timed on the virtual clock")
        elif timeout > 0:
            self._virtual_s += timeout
            if self._virtual_s > self._max_seconds:
                raise HangError(f"the virtual clock passed {self._max_seconds:.0f} s")
