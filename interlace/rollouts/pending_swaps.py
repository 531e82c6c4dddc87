"""Swaps of weights that engines have not made yet."""

from interlace.runtime.waits import Signal, WaitRegistry


class PendingSwaps:
    """Number of engines with pending weights, and the signal for tasks that wait for a version."""

    def __init__(self, waits: WaitRegistry) -> None:
        self.num = 0
        """Number of engines with pending weights."""
        self.changed = Signal(waits)
        """Fires when an engine has swapped or left."""

    def finish(self) -> None:
        """Records that an engine serves its pending weights."""
        self.num -= 1
        self.changed.fire()
