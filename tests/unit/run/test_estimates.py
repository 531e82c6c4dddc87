"""Estimates of an evaluation: pass@k against enumeration, and intervals of known coverage."""

from itertools import combinations

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.run.evaluation import Estimate, Evaluation, bootstrap_interval, estimate, pass_at_k, wilson_interval
from interlace.run.recipe.sections import EvaluationConfig


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_sample(k: int) -> None:
    num_samples = 7
    for num_right in range(num_samples + 1):
        draws = list(combinations([True] * num_right + [False] * (num_samples - num_right), k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at_k(num_samples, np.array([num_right]), k)[0] == pytest.approx(expected)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(100_000, np.array([0, 1, 100_000]), 1000) == pytest.approx([0, 0.01, 1])


def test_intervals_cover_the_mean_as_often_as_they_claim() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval((random.random(80) < 0.3).astype(float), 300, trial)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99
    values = (np.arange(50) % 2).astype(float)
    assert (
        bootstrap_interval(values, 100, 1) == bootstrap_interval(values, 100, 1) != bootstrap_interval(values, 100, 2)
    )


@pytest.mark.parametrize(
    ("right", "size", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_score_interval_has_published_values(right: int, size: int, low: float, high: float) -> None:
    """Newcombe 1998, table I, method 3."""
    found = wilson_interval((np.arange(size) < right).astype(float))
    assert found == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert all(wilson_interval(np.ones(number))[1] == 1 for number in range(2, 40))


def test_estimates_of_a_set() -> None:
    found = estimate([True, False], [[True, False], [False, False]], [1, 2], 100, 0)
    assert {name: each.value for name, each in found.items()} == {
        "greedy": 0.5, "average@2": 0.25, "pass@1": 0.25, "pass@2": 0.5,
    }  # fmt: skip
    assert found["greedy"].low == pytest.approx(0.0945, abs=1e-4) and found["average@2"].low == 0.0
    assert list(estimate([True], [], [], 100, 0)) == ["greedy"]
    assert estimate([True], [], [], 100, 0)["greedy"].low is None, "one prompt has no interval"


def test_settings() -> None:
    assert EvaluationConfig.parse({"pass_at": 2, "samples_per_prompt": 2}).pass_at == (2,)
    with pytest.raises(UserError, match="pass@8 needs 8 sampled answers to each prompt, and samples_per_prompt is 4"):
        EvaluationConfig.parse({"pass_at": [8, 1], "samples_per_prompt": 4})
    with pytest.raises(UserError, match="it must be 1 or more"):
        EvaluationConfig.parse({"pass_at": [0]})


def test_an_evaluation_is_printed_as_its_accuracies() -> None:
    found = {"greedy": Estimate(value=0.5, low=0.15, high=0.85, num_prompts=4)}
    whole = Evaluation(
        num_prompts=4, greedy_accuracy=0.5, sampled_accuracy=0.25, answers=(), estimates={"": found, "hard": found},
        num_failed=1, failure="a time limit",
    )  # fmt: skip
    assert (
        str(whole)
        == repr(whole)
        == (
            "Held-out accuracy of 4 prompts, with 95 % intervals\n  greedy: 0.500 (0.150 - 0.850)\n"
            "  hard, greedy: 0.500 (0.150 - 0.850)\n"
            "  1 answers count as wrong since scoring them failed, the first by a time limit"
        )
    )
    plain = Evaluation(num_prompts=4, greedy_accuracy=0.5, sampled_accuracy=0.25, answers=())
    assert str(plain) == "Held-out accuracy of 4 prompts\n  greedy: 0.500\n  sampled: 0.250"
