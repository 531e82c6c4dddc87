"""Arguments are distributed to ranks, and their results are collected."""

from collections.abc import Sequence
from typing import Any

import pytest

from interlace.core.errors import InterlaceError
from interlace.runtime.rank import collect_results, deal_arguments
from interlace.runtime.worker import Operation


def halves(args: tuple[Any, ...], num_parts: int) -> Sequence[tuple[Any, ...]]:
    """Neighbours stay together; the other arguments go to all."""
    size = -(-len(args[0]) // num_parts)
    return [(args[0][part * size : (part + 1) * size], *args[1:]) for part in range(num_parts)]


def run(how: Operation, args: tuple[Any, ...], copies: int) -> tuple[list[tuple[Any, ...]], Any]:
    """Four ranks, each of which doubles its numbers."""
    dealt = deal_arguments(how, args, num_ranks=4, copies=copies)
    results = [[2 * number for number in arguments[0]] for arguments in dealt.arguments]
    return [*dealt.arguments], collect_results(how, results, dealt, copies=copies)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_ranks_that_share_layers_get_the_same_and_results_come_back_in_order(copies: int) -> None:
    given, doubled = run(Operation(split="samples", collect="concat"), ([3, 1, 4, 1, 5, 9, 2],), copies)
    assert doubled == [6, 2, 8, 2, 10, 18, 4]
    for part in range(4 // copies):
        assert len({tuple(numbers) for (numbers,) in given[part * copies : (part + 1) * copies]}) == 1
    assert sorted(number for (numbers,) in given[::copies] for number in numbers) == [1, 1, 2, 3, 4, 5, 9]


def test_a_user_s_own_split_and_collect() -> None:
    given, largest = run(Operation(split=halves, collect=lambda parts: max(map(sum, parts))), ([1, 2, 3, 4], "x"), 2)
    assert given == [([1, 2], "x"), ([1, 2], "x"), ([3, 4], "x"), ([3, 4], "x")]
    assert largest == 14


def test_a_split_into_another_number_of_parts_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="gave 4 parts for 2"):
        run(Operation(split=lambda args, parts: [args] * 2 * parts), ([1],), 2)


def test_all_is_one_result_a_rank() -> None:
    _, results = run(Operation(collect="all"), ([1],), 2)
    assert results == [[2]] * 4
