"""The engine with the fewest live tokens now."""

import heapq
from collections.abc import Sequence

from interlace.schedule.dispatch import Load


class LeastTokens:
    """Live load, not a count of assignments (which would be round-robin in disguise)."""

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Greedy: each request to the least loaded engine, whose load then grows by what is expected of it."""
        heap = [(load.live_tokens, engine) for engine, load in enumerate(loads)]
        heapq.heapify(heap)
        chosen = []
        for tokens in expected_tokens:
            live, engine = heap[0]
            chosen.append(engine)
            heapq.heapreplace(heap, (live + tokens, engine))
        return chosen


create = LeastTokens
