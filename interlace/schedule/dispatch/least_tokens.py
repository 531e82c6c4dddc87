"""The engine with the fewest live tokens now."""

import heapq
from collections.abc import Sequence

from interlace.schedule.dispatch import DispatchPolicy, Load


class LeastTokens(DispatchPolicy):
    """Live load, not a count of assignments (which would be round-robin in disguise)."""

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns greedily: each request to the least loaded engine, whose load grows by what is expected of it."""
        return least_loaded(range(len(expected_tokens)), range(len(loads)), expected_tokens, loads)


def least_loaded(
    order: Sequence[int], engines: Sequence[int], expected_tokens: Sequence[float], loads: Sequence[Load]
) -> list[int]:
    """Returns the engine of each request in `order`, chosen among `engines` one after another."""
    heap = [(loads[engine].live_tokens, engine) for engine in engines]
    heapq.heapify(heap)
    chosen = []
    for request in order:
        live, engine = heap[0]
        chosen.append(engine)
        heapq.heapreplace(heap, (live + expected_tokens[request], engine))
    return chosen


create = LeastTokens
