"""Dispatch to the engine with the fewest live tokens."""

import heapq
from collections.abc import Sequence

from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.loads import Loads


class LeastTokens(DispatchPolicy):
    """Uses the live load. A count of assignments would amount to round-robin."""

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns requests greedily, each to the least loaded engine.

        The predicted tokens are then added to its load.
        """
        return least_loaded(range(len(expected_tokens)), range(len(loads)), expected_tokens, loads)


def least_loaded(
    order: Sequence[int], engines: Sequence[int], expected_tokens: Sequence[float], loads: Sequence[Load]
) -> list[int]:
    """Returns the engine of each request in `order`, chosen among `engines` one after another."""
    if isinstance(loads, Loads) and len(engines) == len(loads):
        return loads.assign_least(order, expected_tokens)
    heap = [(loads[engine].live_tokens, engine) for engine in engines]
    heapq.heapify(heap)
    chosen = []
    for request in order:
        live, engine = heap[0]
        chosen.append(engine)
        heapq.heapreplace(heap, (live + expected_tokens[request], engine))
    return chosen


create = LeastTokens
