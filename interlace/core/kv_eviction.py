"""Order in which keys and values, kept for samples whose tools run, go where cells are needed. Pure."""

import math
from collections import deque
from collections.abc import Sequence

QUANTILE = 0.99
"""Share of the measured waits that end within the patience."""
MEMORY = 512
"""Waits that are remembered."""
FEW = 16
"""Waits below which their quantile says nothing."""


class ReturnTimes:
    """Seconds that samples took to come back with their next turn: the time of their tools, as an engine sees it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MEMORY)
        self._patience_s = math.inf
        self._num_unread = 0

    def observe(self, seconds: float) -> None:
        """Takes in one wait that ended."""
        self._seconds.append(seconds)
        self._num_unread += 1

    @property
    def patience_s(self) -> float:
        """Seconds after which a sample counts as one that does not come back soon; infinite while few have ended."""
        # Sorted now and then, not at every look.
        if len(self._seconds) >= FEW and self._num_unread > len(self._seconds) // 8:
            self._num_unread = 0
            ordered = sorted(self._seconds)
            self._patience_s = ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)))]
        return self._patience_s


def first_to_go(waits: Sequence[tuple[float, int]], *, patience_s: float) -> int:
    """Chooses among what is kept: (seconds that it has waited, its tokens) of each. Returns the place of the choice.

    What waits for longer than nearly all tools take goes first, the longest wait of all before others. Else the
    fewest tokens, which are computed again the fastest; of several, the one that has waited longest. The earlier place
    breaks ties.
    """
    late = [(-waited_s, place) for place, (waited_s, _) in enumerate(waits) if waited_s > patience_s]
    if late:
        return min(late)[1]
    return min((num_tokens, -waited_s, place) for place, (waited_s, num_tokens) in enumerate(waits))[2]
