"""Message on the longest wait of a run, printed after a period without output."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from interlace.observe.progress import ProgressView

LOOK_EVERY_S = 0.25
FIRST_S, FACTOR = 15.0, 2.0
"""Seconds without output before the first line, and the factor by which each following period is longer."""


class Waits(Protocol):
    """Source of a line on the longest wait."""

    def longest(self) -> str: ...


class QuietWatch:
    """Prints a line if a silence lasts longer than a step usually takes."""

    def __init__(self, progress: ProgressView) -> None:
        self._progress = progress
        self._title = "start"
        self._since_s, self._due_s = time.monotonic(), FIRST_S

    def heard(self, title: str) -> None:
        """Resets the idle timer after output; phase `title` starts."""
        now_s = time.monotonic()
        self._due_s = max(FIRST_S, FACTOR * (now_s - self._since_s))
        self._title, self._since_s = title, now_s

    async def run(self, waits: Waits, note: Callable[[], str]) -> None:
        """Checks periodically, without end. note: returns a remark on the run's state."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            quiet_s = time.monotonic() - self._since_s
            if quiet_s < self._due_s:
                continue
            self._due_s = quiet_s * FACTOR
            words = [f"{self._title}: {quiet_s:.0f} s so far", waits.longest(), note()]
            self._progress.say("; ".join(word for word in words if word))
