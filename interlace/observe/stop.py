"""Handling of Ctrl-C and a scheduler's SIGTERM: one signal requests a stop at the next step boundary, two abort.

The run waits at most PATIENCE_S for the boundary, because schedulers kill a process 30 s after SIGTERM.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 4.0
"""Seconds that a run continues towards the end of its step after a request to stop."""


def raise_on_stop_signals() -> None:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, which calls this function.

    A shell ignores SIGINT for the background jobs of a script, and their processes inherit this.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


class StopSignal:
    """Handler of stop signals during its `with` block. Only a main thread can install it; elsewhere it does nothing."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        """on_request: called at the first signal, within the signal handler; it should only print that the run will
        stop.
        """
        self._on_request = on_request
        self._requested = False
        self._requested_s = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        """Returns True if the loop should end at the next step boundary."""
        return self._requested

    @property
    def is_overdue(self) -> bool:
        """Returns True if the time to wait for a boundary is over."""
        return self._requested and time.monotonic() - self._requested_s > PATIENCE_S

    def abort_if_requested(self) -> None:
        """Raises KeyboardInterrupt, as a second Ctrl-C would, if there is no boundary to wait for."""
        if self._requested:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle_signal) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested, self._requested_s = True, time.monotonic()
        self._on_request()
