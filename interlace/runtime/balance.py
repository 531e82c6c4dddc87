"""Assigns work to data-parallel ranks by load."""

import heapq
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
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
    # Heaps of (total, place) for thousands of ranks. An entry with another total than its rank's is outdated.
    full = [(-rank.total, place) for place, rank in enumerate(ranks)]
    empty = [(rank.total, place) for place, rank in enumerate(ranks)]
    heapq.heapify(full)
    heapq.heapify(empty)
    while True:
        while -full[0][0] != ranks[full[0][1]].total:
            heapq.heappop(full)
        while empty[0][0] != ranks[empty[0][1]].total:
            heapq.heappop(empty)
        places = full[0][1], empty[0][1]
        fullest, emptiest = (ranks[place] for place in places)
        moves = [
            (max(fullest.total - fullest.loss(item), emptiest.total + emptiest.gain(item)), item)
            for item in fullest.items
        ]
        larger, item = min(moves, default=(fullest.total, -1))
        if larger >= fullest.total:
            return
        fullest.remove(item)
        emptiest.add(item)
        for place in places:
            heapq.heappush(full, (-ranks[place].total, place))
            heapq.heappush(empty, (ranks[place].total, place))


_Share = tuple[int, tuple[int, ...]]
"""Total of a rank, and its items."""


class _Partition:
    """Assignment of some items to ranks, in descending order of load. Ranks without items are at the end, implicit."""

    def __init__(self, shares: list[_Share], num_ranks: int) -> None:
        self._shares, self._num_ranks = shares, num_ranks

    @property
    def spread(self) -> int:
        """Difference between the fullest and the emptiest rank."""
        return self._shares[0][0] - (self._shares[-1][0] if len(self._shares) == self._num_ranks else 0)

    @property
    def items(self) -> list[list[int]]:
        missing = self._num_ranks - len(self._shares)
        return [*(sorted(items) for _, items in self._shares), *([] for _ in range(missing))]

    def merge(self, other: "_Partition") -> "_Partition":
        """Merges the fullest rank of one partition with the emptiest rank of the other, and so on."""
        mine, others = self._shares, other._shares
        if len(others) == 1 and len(mine) < self._num_ranks:  # most merges: one item goes to a rank without items
            insort(mine, others[0], key=_negate_total)
            return self
        num_common = max(0, len(mine) + len(others) - self._num_ranks)
        alone, reverse = len(mine) - num_common, others[::-1]
        both = zip(mine[alone:], reverse[:num_common], strict=True)
        merged = [(total + more, own + added) for (total, own), (more, added) in both]
        shares = sorted([*mine[:alone], *merged, *reverse[num_common:]], key=_negate_total)
        return _Partition(shares, self._num_ranks)


def _negate_total(share: _Share) -> int:
    return -share[0]


def _deal_by_difference(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assigns items by largest differencing (Karmarkar and Karp, 1982).

    The two most uneven partitions are merged repeatedly, full ranks of one with empty ranks of the other, until one
    partition is left.
    """
    singles = (_Partition([(load, (number,))], num_ranks) for number, load in enumerate(loads))
    heap = [(-alone.spread, number, alone) for number, alone in enumerate(singles)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = first.merge(second)
        heapq.heappush(heap, (-merged.spread, number, merged))
    return heap[0][2].items if heap else [[] for _ in range(num_ranks)]
