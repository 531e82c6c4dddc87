"""Work is dealt evenly, and the same way every time."""

import random

from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.balance import deal

LOADS = st.lists(st.integers(0, 5000), max_size=40)


def totals(loads: list[int], dealt: list[list[int]]) -> list[int]:
    return [sum(loads[item] for item in items) for items in dealt]


def greedy(loads: list[int], num_ranks: int) -> int:
    """The largest total where each item, longest first, goes to the emptiest rank."""
    ranks = [0] * num_ranks
    for load in sorted(loads, reverse=True):
        ranks[ranks.index(min(ranks))] += load
    return max(ranks)


@given(LOADS, st.integers(1, 9))
def test_each_item_goes_to_one_rank_in_order(loads: list[int], num_ranks: int) -> None:
    dealt = deal(loads, num_ranks)
    assert len(dealt) == num_ranks
    assert sorted(item for items in dealt for item in items) == list(range(len(loads)))
    assert all(items == sorted(items) for items in dealt)


@given(LOADS, st.integers(2, 9))
def test_no_rank_is_far_above_the_mean(loads: list[int], num_ranks: int) -> None:
    """No rank has more than the mean and one item."""
    assert max(totals(loads, deal(loads, num_ranks))) <= sum(loads) / num_ranks + max(loads, default=0)


def test_it_is_more_even_than_longest_first_to_the_emptiest() -> None:
    draw = random.Random(0)
    excess = []
    for _ in range(100):
        loads = [int(draw.lognormvariate(6, 1)) for _ in range(64)]
        mean = sum(loads) / 8
        excess.append((max(totals(loads, deal(loads, 8))) - mean, greedy(loads, 8) - mean))
    assert sum(ours <= theirs for ours, theirs in excess) > 70
    assert sum(ours for ours, _ in excess) < sum(theirs for _, theirs in excess)
