"""Costs are fitted from times: exact values are recovered, and noise never gives negative costs."""

import asyncio
import math
import random

import numpy as np
import pytest

from interlace.forecast.profile.fit import fit, intraclass_correlation, log_spread, medians
from interlace.forecast.profile.training import split_slowdown


def test_coefficients_of_very_different_size_are_found() -> None:
    true = [2e-3, 3e-7, 5e-5]
    rows = [[1.0, tokens, count] for tokens in (10, 1000, 50_000) for count in (1, 8, 64)]
    found = fit(rows, [float(np.dot(row, true)) for row in rows])
    assert found == pytest.approx(true, rel=1e-6)


def test_noise_makes_no_cost_negative() -> None:
    draw = random.Random(0)
    rows = [[1.0, tokens] for tokens in range(1, 40)]
    found = fit(rows, [0.010 * draw.uniform(0.9, 1.1) for _ in rows])
    assert min(found) >= 0
    assert found[0] == pytest.approx(0.010, rel=0.1)


def test_a_slow_call_counts_by_its_ratio_as_a_quick_one_does() -> None:
    found = fit([[1.0], [1.0]], [1.0, 100.0])
    assert found[0] < 3, "the quick one is not drowned"


def test_medians_are_taken_in_turns_after_one_round_that_is_not_counted() -> None:
    made: list[str] = []

    def call(name: str):  # type: ignore[no-untyped-def]
        async def make() -> None:
            made.append(name)

        return make

    asyncio.run(medians([call("a"), call("b")], rounds=2, budget_s=60))
    assert made == ["a", "b"] * 3
    made.clear()
    asyncio.run(medians([call("a")], rounds=50, budget_s=0))
    assert made == ["a"] * 2, "one round is always counted"


def test_the_spread_of_lengths_is_split_between_prompts_and_responses() -> None:
    draw = random.Random(1)
    means = [draw.gauss(3, 0.5) for _ in range(400)]
    groups = [[math.exp(draw.gauss(mean, 0.3)) for _ in range(8)] for mean in means]
    found = log_spread(groups)
    assert found.between == pytest.approx(0.5, rel=0.1)
    assert found.within == pytest.approx(0.3, rel=0.05)


def test_equal_lengths_have_no_spread() -> None:
    found = log_spread([[4.0, 4.0], [4.0, 4.0]])
    assert (found.between, found.within) == (0, 0)


def test_likeness_is_0_for_chance_and_1_for_prompts_that_are_always_or_never_solved() -> None:
    draw = random.Random(2)
    assert intraclass_correlation([[True] * 8, [False] * 8] * 50) == pytest.approx(1)
    assert intraclass_correlation([[draw.random() < 0.3 for _ in range(8)] for _ in range(2000)]) == pytest.approx(
        0, abs=0.02
    )
    assert intraclass_correlation([[True, True], [True, True]]) == 0


def test_two_calls_split_a_slowdown_into_the_constant_part_of_a_call_and_the_rest() -> None:
    shares = [0.1, 0.6]
    slowdowns = [share * 4 + (1 - share) * 1.5 for share in shares]
    found = split_slowdown("actor", "rollout", shares, slowdowns)
    assert (found.call_slowdown, found.slowdown) == pytest.approx((4.0, 1.5))
    single = split_slowdown("rollout", "rollout", [0.0], [1.8])
    assert (single.call_slowdown, single.slowdown) == (None, 1.8)
