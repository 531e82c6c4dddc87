"""Assigns work to data-parallel ranks by load."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple


class RankLoad(NamedTuple):
    """Load that one item adds to its rank."""

    own: int
    shared: int = 0
    """Cost that the items of a group on one rank incur only once, such as their prompt."""
    group: Hashable = None


def deal(loads: Sequence[RankLoad], num_ranks: int) -> list[list[int]]:
    """Returns the indices of the items for each rank, so that the largest load is small. Ties keep the item order.

    A group starts out whole on one rank, because its shared cost then counts once. Items move away from their group if
    this relieves the fullest rank. If the shared costs are small, items are assigned one by one when that balances
    better.
    """
    if num_ranks == 1:
        return [list(range(len(loads)))]
    apart = _deal_by_difference([load.own + load.shared for load in loads], num_ranks)
    if not any(load.shared for load in loads):
        return apart
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for item, load in enumerate(loads):
        groups[load.group].append(item)
    whole = list(groups.values())
    dealt = _deal_by_difference([_Rank(loads, items).total for items in whole], num_ranks)
    together = [_Rank(loads, chain.from_iterable(whole[place] for place in places)) for places in dealt]
    _level_ranks(together)
    singly = [_Rank(loads, items) for items in apart]
    return [sorted(rank.items) for rank in min(together, singly, key=lambda ranks: max(rank.total for rank in ranks))]


class _Rank:
    """Items of one rank, and their total load."""

    def __init__(self, loads: Sequence[RankLoad], items: Iterable[int]) -> None:
        self._loads, self._num_of = loads, Counter[Hashable]()
        self.items: set[int] = set()
        self.total = 0
        for item in items:
            self.add(item)

    def gain(self, item: int) -> int:
        """Returns the increase of the rank's total from one more item."""
        own, shared, group = self._loads[item]
        return own if self._num_of[group] else own + shared

    def loss(self, item: int) -> int:
        """Returns the decrease of the rank's total without one of its items."""
        own, shared, group = self._loads[item]
        return own if self._num_of[group] > 1 else own + shared

    def add(self, item: int) -> None:
        self.total += self.gain(item)
        self.items.add(item)
        self._num_of[self._loads[item].group] += 1

    def remove(self, item: int) -> None:
        self.total -= self.loss(item)
        self.items.remove(item)
        self._num_of[self._loads[item].group] -= 1


def _level_ranks(ranks: Sequence[_Rank]) -> None:
    """Moves items from the fullest rank to the emptiest as long as each move lowers the larger of the two totals."""
    while True:
        fullest, emptiest = max(ranks, key=lambda rank: rank.total), min(ranks, key=lambda rank: rank.total)
        moves = [
            (max(fullest.total - fullest.loss(item), emptiest.total + emptiest.gain(item)), item)
            for item in fullest.items
        ]
        larger, item = min(moves, default=(fullest.total, -1))
        if larger >= fullest.total:
            return
        fullest.remove(item)
        emptiest.add(item)


@dataclass(frozen=True, slots=True)
class _Partition:
    """Assignment of some items to the ranks, in descending order of load."""

    totals: tuple[int, ...]
    items: tuple[tuple[int, ...], ...]

    @property
    def spread(self) -> int:
        return self.totals[0] - self.totals[-1]

    def merge(self, other: "_Partition") -> "_Partition":
        """Merges the fullest rank of one partition with the emptiest rank of the other, and so on."""
        pairs = zip(self.totals, self.items, reversed(other.totals), reversed(other.items), strict=True)
        ranks = sorted(((total + more, own + others) for total, own, more, others in pairs), key=lambda rank: -rank[0])
        return _Partition(tuple(total for total, _ in ranks), tuple(items for _, items in ranks))


def _deal_by_difference(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assigns items by largest differencing (Karmarkar and Karp, 1982).

    The two most uneven partitions are merged repeatedly, full ranks of one with empty ranks of the other, until one
    partition is left.
    """
    none = ((),) * (num_ranks - 1)
    heap = []
    for number, load in enumerate(loads):
        alone = _Partition((load, *[0] * (num_ranks - 1)), ((number,), *none))
        heap.append((-alone.spread, number, alone))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = first.merge(second)
        heapq.heappush(heap, (-merged.spread, number, merged))
    return [sorted(items) for items in heap[0][2].items] if heap else [[] for _ in range(num_ranks)]
