"""Dealing work to data-parallel ranks by load."""

import heapq
from collections.abc import Sequence


def deal(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the items for each rank: longest first to the least loaded one (LPT, within 4/3 of the optimum)."""
    if num_ranks == 1:
        return [list(range(len(loads)))]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        total, rank = heap[0]
        ranks[rank].append(item)
        heapq.heapreplace(heap, (total + loads[item], rank))
    return [sorted(items) for items in ranks]
