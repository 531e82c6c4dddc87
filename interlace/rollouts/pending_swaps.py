"""Swaps of weights that engines have not made yet."""

import itertools
from typing import TYPE_CHECKING

from interlace.runtime.waits import Signal, WaitRegistry

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver


class PendingSwaps:
    """Engines with pending weights or queued requests, and the signal for tasks that wait for a version."""

    def __init__(self, waits: WaitRegistry) -> None:
        self.num = 0
        """Number of engines with pending weights."""
        self.queues: dict[EngineDriver, None] = {}
        """Engines with queued requests: few, even on a cluster with thousands of engines."""
        self._numbers = itertools.count()
        self.changed = Signal(waits)
        """Fires when an engine has swapped or left."""

    def number_engine(self) -> int:
        """Returns the number of a new engine."""
        return next(self._numbers)

    def finish(self) -> None:
        """Records that an engine serves its pending weights."""
        self.num -= 1
        self.changed.fire()
