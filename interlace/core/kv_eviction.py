"""Eviction order of the KV caches of samples whose tools run. Pure functions of the measured times."""

import math
from collections import deque
from collections.abc import Sequence

QUANTILE = 0.99
"""Quantile of the measured waits that is the patience."""
MEMORY = 512
"""Number of the latest waits that are kept."""
FEW = 16
"""Number of waits below which the patience is infinite."""


class ReturnTimes:
    """Measured times from the end of a turn to the sample's next turn: the time of tools, as an engine observes it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MEMORY)
        self._patience_s = math.inf
        self._num_unread = 0

    def observe(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._num_unread += 1

    @property
    def patience_s(self) -> float:
        """Seconds of waiting after which a sample is late. Infinite until FEW waits were measured."""
        # Sorted after every eighth of new waits only.
        if len(self._seconds) >= FEW and self._num_unread > len(self._seconds) // 8:
            self._num_unread = 0
            ordered = sorted(self._seconds)
            self._patience_s = ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)))]
        return self._patience_s


def first_to_go(waits: Sequence[tuple[float, int]], *, patience_s: float) -> int:
    """Returns the index of the KV cache to evict. waits: (seconds of waiting, number of tokens) of each cache.

    If a sample has waited longer than `patience_s`, the longest wait is evicted. Otherwise the cache with the fewest
    tokens is evicted, because it is recomputed fastest, then the longest wait. The smaller index breaks ties.
    """
    late = [(-waited_s, place) for place, (waited_s, _) in enumerate(waits) if waited_s > patience_s]
    if late:
        return min(late)[1]
    return min((num_tokens, -waited_s, place) for place, (waited_s, num_tokens) in enumerate(waits))[2]
