"""Work is distributed evenly and deterministically."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.balance import RankLoad, deal

SIZES = st.lists(st.integers(0, 5000), max_size=40)
GROUPED = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 6)), max_size=40)


def single(sizes: Sequence[int]) -> list[RankLoad]:
    return [RankLoad(size) for size in sizes]


def grouped(items: Sequence[tuple[int, int]]) -> list[RankLoad]:
    """Group g shares 100 g."""
    return [RankLoad(own, shared=100 * group, group=group) for own, group in items]


def totals(loads: Sequence[RankLoad], dealt: Sequence[Sequence[int]]) -> list[int]:
    """With what a group shares once a rank."""
    shared = [{loads[item].group: loads[item].shared for item in items} for items in dealt]
    return [sum(loads[item].own for item in items) + sum(shared[rank].values()) for rank, items in enumerate(dealt)]


def greedy(sizes: Sequence[int], num_ranks: int) -> int:
    """The largest total where each item, longest first, goes to the emptiest rank."""
    ranks = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        ranks[ranks.index(min(ranks))] += size
    return max(ranks)


@given(GROUPED, st.integers(1, 9))
def test_each_item_goes_to_one_rank_in_order(items: list[tuple[int, int]], num_ranks: int) -> None:
    dealt = deal(grouped(items), num_ranks)
    assert len(dealt) == num_ranks
    assert sorted(item for each in dealt for item in each) == list(range(len(items)))
    assert all(each == sorted(each) for each in dealt)


@given(SIZES, st.integers(2, 9))
def test_no_rank_is_far_above_the_mean(sizes: list[int], num_ranks: int) -> None:
    """No rank has more than the mean and one item."""
    loads = single(sizes)
    assert max(totals(loads, deal(loads, num_ranks))) <= sum(sizes) / num_ranks + max(sizes, default=0)


def test_it_is_more_even_than_longest_first_to_the_emptiest() -> None:
    draw = random.Random(0)
    excess = []
    for _ in range(100):
        sizes = [int(draw.lognormvariate(6, 1)) for _ in range(64)]
        mean = sum(sizes) / 8
        loads = single(sizes)
        excess.append((max(totals(loads, deal(loads, 8))) - mean, greedy(sizes, 8) - mean))
    assert sum(ours <= theirs for ours, theirs in excess) > 70
    assert sum(ours for ours, _ in excess) < sum(theirs for _, theirs in excess)


@given(GROUPED, st.integers(2, 9))
def test_what_groups_share_never_makes_it_worse_than_items_dealt_one_by_one(
    items: list[tuple[int, int]], num_ranks: int
) -> None:
    loads = grouped(items)
    alone = deal(single([load.own + load.shared for load in loads]), num_ranks)
    assert max(totals(loads, deal(loads, num_ranks))) <= max(totals(loads, alone))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 300), st.integers(1, 300))
def test_groups_that_come_out_even_stay_whole(ranks: int, groups_a_rank: int, own: int, shared: int) -> None:
    loads = [RankLoad(own, shared=shared, group=index // 8) for index in range(8 * ranks * groups_a_rank)]
    dealt = deal(loads, ranks)
    assert totals(loads, dealt) == [groups_a_rank * (8 * own + shared)] * ranks


def test_a_group_too_large_for_its_rank_is_shared_out() -> None:
    loads = [RankLoad(10, shared=30, group="long")] * 8 + [RankLoad(10, shared=0, group="short")] * 2
    assert sorted(totals(loads, deal(loads, 2))) == [80, 80]


def merge_all_ranks(
    one: list[tuple[int, tuple[int, ...]]], two: list[tuple[int, tuple[int, ...]]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merges two partitions over all ranks, also those without items."""
    pairs = zip(one, reversed(two), strict=True)
    return sorted(((a + b, items + others) for (a, items), (b, others) in pairs), key=lambda share: -share[0])


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(2, 12))
def test_ranks_without_items_do_not_change_the_partition(sizes: list[int], num_ranks: int) -> None:
    """Their places are not stored: with hundreds of ranks, a partition of one item would have hundreds of them."""
    none: list[tuple[int, tuple[int, ...]]] = [(0, ())] * (num_ranks - 1)
    heap = [(-size, number, [(size, (number,)), *none]) for number, size in enumerate(sizes)]
    while len(heap) > 1:
        heap.sort(key=lambda entry: entry[:2])
        (_, number, one), (_, _, two), *heap = heap
        merged = merge_all_ranks(one, two)
        heap.append((merged[-1][0] - merged[0][0], number, merged))
    expected = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_ranks)]
    assert deal(single(sizes), num_ranks) == expected
