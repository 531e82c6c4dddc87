"""Ctrl-C, or a scheduler's SIGTERM: once asks for a stop at the next step boundary, twice aborts.

A boundary that is further off than PATIENCE_S is not waited for: the sender of SIGTERM kills the process 30 s later.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 4.0
"""How long a run that was asked to stop goes on towards the end of its step."""


class StopSignal:
    """Listens for signals while its `with` block runs. Only a main thread hears them; elsewhere it stays silent."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        """on_request: called at the first signal, inside its handler: say that the run will stop, no more."""
        self._on_request = on_request
        self._requested = False
        self._requested_s = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        """Returns whether the loop should end at the next step boundary."""
        return self._requested

    @property
    def is_overdue(self) -> bool:
        """Returns whether a boundary was waited for as long as it may be."""
        return self._requested and time.monotonic() - self._requested_s > PATIENCE_S

    def abort_if_requested(self) -> None:
        """Raises KeyboardInterrupt, as a second Ctrl-C would, where there is no boundary to wait for."""
        if self._requested:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested, self._requested_s = True, time.monotonic()
        self._on_request()
