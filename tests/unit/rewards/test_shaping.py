"""The form of a response adds to its reward."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import Prompt, RewardResult, Sample, SampleKey, Segment
from interlace.rewards.config import RewardConfig
from interlace.rewards.scorer import Scorer
from interlace.rewards.shaping import ShapingConfig, group_shaped, measure_repetition, overlong_share, shape_result

TOKENS = np.arange(10, dtype=np.int32)


@pytest.mark.parametrize(("length", "share"), [(6, 0), (8, 0), (9, 0.5), (10, 1), (11, 1)])
def test_the_overlong_penalty_grows_over_its_buffer(length: int, share: float) -> None:
    assert overlong_share(length, 10, 2) == share


def test_without_a_buffer_the_limit_itself_is_free() -> None:
    assert overlong_share(10, 10, 0) == 0 and overlong_share(11, 10, 0) == 1


@given(tokens=st.lists(st.integers(0, 3), max_size=20), ngram=st.integers(1, 4))
def test_repetition_is_a_share(tokens: list[int], ngram: int) -> None:
    share = measure_repetition(np.array(tokens, np.int32), ngram)
    assert 0 <= share < 1
    assert measure_repetition(np.arange(len(tokens), dtype=np.int32), ngram) == 0


def test_repetition_counts_runs_that_came_before() -> None:
    assert measure_repetition(np.array([1, 2, 1, 2, 1], np.int32), 2) == 0.5  # 12 21 12 21


def test_parts_are_named_and_add_up() -> None:
    config = ShapingConfig(overlong_limit=10, overlong_buffer=4, overlong_penalty=2, repetition_ngram=1)
    found = shape_result(RewardResult(reward=5.0, parts={"accuracy": 1.0}), np.zeros(8, np.int32), config)
    assert found.parts == {"accuracy": 1.0, "task": 5.0, "overlong": -1.0, "repetition": -0.875}
    assert found.reward == 5 - 1 - 0.875


def test_parts_are_weighed() -> None:
    result = RewardResult(reward=3.0, parts={"right": 2.0, "format": 1.0})
    found = shape_result(result, TOKENS, ShapingConfig(weights={"format": 0.1, "absent": 7.0}))
    assert found.reward == pytest.approx(2.1) and found.parts == result.parts


def test_nothing_is_added_by_default_and_a_failure_stays_one() -> None:
    result = RewardResult(reward=1.0, parts={"accuracy": 1.0})
    assert shape_result(result, TOKENS, ShapingConfig()) is result
    failed = RewardResult(failure="timed out")
    assert shape_result(failed, TOKENS, ShapingConfig(overlong_limit=1)) is failed


def test_a_buffer_beyond_its_limit_is_refused() -> None:
    with pytest.raises(UserError, match="overlong_buffer"):
        RewardConfig.parse({"shaping": {"overlong_limit": 4, "overlong_buffer": 8}})


def test_a_scorer_shapes_what_it_scores() -> None:
    prompt = Prompt(uid="p", token_ids=TOKENS, text="", answer="yes")
    sample = Sample(key=SampleKey(0, 0), prompt=prompt, segments=(Segment(token_ids=TOKENS),), text="yes")
    scorer = Scorer(RewardConfig(name="exact", workers=0, shaping=ShapingConfig(overlong_limit=5)))
    (found,) = asyncio.run(scorer.score([sample]))
    assert found.reward == 4 and found.parts["overlong"] == -1


def kimi(lengths: list[int], rights: list[bool]) -> list[float]:
    """arXiv 2501.12599, section 2.3.3, as it is written there."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    lambdas = [0.5 - (length - low) / (high - low) for length in lengths]
    return [value if right else min(0.0, value) for value, right in zip(lambdas, rights, strict=True)]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=8), st.floats(0.1, 3))
def test_the_length_reward_is_that_of_the_paper(group: list[tuple[int, bool]], weight: float) -> None:
    lengths, rights = [length for length, _ in group], [right for _, right in group]
    results = [RewardResult(reward=5.0 if right else -5.0, parts={"accuracy": float(right)}) for right in rights]
    config = ShapingConfig(length_weight=weight)
    for result, found, expected in zip(
        results, group_shaped(results, lengths, config), kimi(lengths, rights), strict=True
    ):
        assert found.parts["length"] == pytest.approx(weight * expected)
        assert found.reward == pytest.approx(result.reward + found.parts["length"])
        assert found.parts["task"] == result.reward and found.parts["accuracy"] == result.parts["accuracy"]


def test_what_counts_as_right_is_the_task_alone() -> None:
    """A right answer that is punished for its length is still right."""
    scored = shape_result(RewardResult(reward=0.5), TOKENS, ShapingConfig(overlong_limit=5, overlong_penalty=1))
    assert scored.reward < 0
    config = ShapingConfig(length_weight=1.0)
    assert [found.parts["length"] for found in group_shaped([scored, scored], [3, 10], config)] == [0.5, -0.5]
    strict = ShapingConfig(length_weight=1.0, length_right_above=0.5)
    assert [found.parts["length"] for found in group_shaped([scored, scored], [3, 10], strict)] == [0.0, -0.5]


def test_without_a_weight_a_group_is_left_alone() -> None:
    results = [RewardResult(reward=1.0), RewardResult(reward=2.0)]
    assert group_shaped(results, [1, 2], ShapingConfig()) == results
