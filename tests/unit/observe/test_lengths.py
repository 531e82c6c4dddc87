"""The Kolmogorov-Smirnov distance and the shift of the means are correct."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.observe.run_data import LengthBias, ks_distance

LENGTHS = st.lists(st.integers(1, 30), min_size=1)


@given(LENGTHS, LENGTHS)
def test_the_distance_is_the_largest_gap_of_the_cumulative_shares(first: list[int], second: list[int]) -> None:
    def share(lengths: list[int], bound: int) -> float:
        return sum(length <= bound for length in lengths) / len(lengths)

    gap = max(abs(share(first, bound) - share(second, bound)) for bound in range(31))
    assert ks_distance(first, second) == pytest.approx(gap)


def test_keeping_the_short_half_shifts_the_mean_down() -> None:
    bias = LengthBias.of([1, 2], [1, 2, 3, 4])
    assert bias is not None
    assert (bias.mean_shift, bias.ks_distance) == (-1.0, 0.5)


def test_without_samples_there_is_no_bias() -> None:
    assert LengthBias.of([], [1]) is None
