"""Ticks are round, few, and cover the drawn range."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from interlace.forecast.plan_report import Scale, label, nice_ticks

NUMBERS = st.floats(-1e6, 1e6)


@given(NUMBERS, NUMBERS, st.integers(2, 8))
def test_ticks_are_few_even_and_cover_the_range(first: float, second: float, count: int) -> None:
    low, high = min(first, second), max(first, second)
    assume(high - low > 1e-6 * max(1.0, abs(high)))
    ticks = nice_ticks(low, high, count)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert 2 <= len(ticks) <= 2 * count + 2
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - nice) for nice in (1, 2, 2.5, 5, 10)) < 1e-6


@given(NUMBERS)
def test_one_value_has_ticks_around_it(value: float) -> None:
    ticks = nice_ticks(value, value, 4)
    assert ticks[0] <= value <= ticks[-1] and len(ticks) > 1


def test_a_scale_maps_ends_to_ends_even_where_they_coincide() -> None:
    assert [Scale(low=0, high=4, start=100, end=0)(value) for value in (0, 1, 4)] == [100, 75, 0]
    assert Scale(low=3, high=3, start=0, end=9)(3) == 0


def test_labels_are_short_at_any_size() -> None:
    assert [label(value) for value in (0, 0.25, 9999, 12500, 2e6, 0.00002)] == [
        "0",
        "0.25",
        "9999",
        "12.5k",
        "2M",
        "2e-05",
    ]
