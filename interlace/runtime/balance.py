"""Dealing work to data-parallel ranks by load."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Partition:
    """Some of the items, dealt to the ranks, the fullest first."""

    totals: tuple[int, ...]
    items: tuple[tuple[int, ...], ...]

    @property
    def spread(self) -> int:
        return self.totals[0] - self.totals[-1]

    def merged(self, other: "_Partition") -> "_Partition":
        """The fullest rank of one with the emptiest of the other, and so on."""
        pairs = zip(self.totals, self.items, reversed(other.totals), reversed(other.items), strict=True)
        ranks = sorted(((total + more, own + others) for total, own, more, others in pairs), key=lambda rank: -rank[0])
        return _Partition(tuple(total for total, _ in ranks), tuple(items for _, items in ranks))


def deal(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the items for each rank, so that the largest total is small.

    The largest differencing method (Karmarkar and Karp, 1982): the two partitions that are least even are merged, the
    full ranks of one with the empty ranks of the other, until one is left. Ties keep the items' order.
    """
    if num_ranks == 1:
        return [list(range(len(loads)))]
    none = ((),) * (num_ranks - 1)
    heap = []
    for number, load in enumerate(loads):
        alone = _Partition((load, *[0] * (num_ranks - 1)), ((number,), *none))
        heap.append((-alone.spread, number, alone))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = first.merged(second)
        heapq.heappush(heap, (-merged.spread, number, merged))
    return [sorted(items) for items in heap[0][2].items] if heap else [[] for _ in range(num_ranks)]
