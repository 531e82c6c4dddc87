"""A line on what is waited for, where nothing else has been said for a while."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from interlace.observe.progress import ProgressView

LOOK_EVERY_S = 0.25
FIRST_S, FACTOR = 15.0, 2.0
"""Seconds without a line before the first one on what is waited for, and how much longer each next one takes."""


class Waits(Protocol):
    """Source of a line on the longest wait."""

    def longest(self) -> str: ...


class QuietWatch:
    """Breaks a silence that is longer than a step usually takes."""

    def __init__(self, progress: ProgressView) -> None:
        self._progress = progress
        self._title = "start"
        self._since_s, self._due_s = time.monotonic(), FIRST_S

    def heard(self, title: str) -> None:
        """Restarts the silence: something was shown, and `title` begins now."""
        now_s = time.monotonic()
        self._due_s = max(FIRST_S, FACTOR * (now_s - self._since_s))
        self._title, self._since_s = title, now_s

    async def run(self, waits: Waits, note: Callable[[], str]) -> None:
        """Looks now and then, for ever. note: what to add on how it goes."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            quiet_s = time.monotonic() - self._since_s
            if quiet_s < self._due_s:
                continue
            self._due_s = quiet_s * FACTOR
            words = [f"{self._title}: {quiet_s:.0f} s so far", waits.longest(), note()]
            self._progress.say("; ".join(word for word in words if word))
