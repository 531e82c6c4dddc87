"""Common beginnings of contexts."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from interlace.rollouts.turns import count_common

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_equal_tokens_are_counted_up_to_the_first_difference(one: list[int], other: list[int]) -> None:
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    assert count_common(np.asarray(one, np.int32), np.asarray(other, np.int32)) == expected
