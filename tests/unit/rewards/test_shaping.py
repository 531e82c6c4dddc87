"""What a response's form adds to its reward."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import Prompt, RewardResult, Sample, SampleKey
from interlace.rewards.base import RewardConfig
from interlace.rewards.scorer import Scorer
from interlace.rewards.shaping import ShapingConfig, overlong_share, repeated_share, shaped

TOKENS = np.arange(10, dtype=np.int32)


@pytest.mark.parametrize(("length", "share"), [(6, 0), (8, 0), (9, 0.5), (10, 1), (11, 1)])
def test_the_overlong_penalty_grows_over_its_buffer(length: int, share: float) -> None:
    assert overlong_share(length, 10, 2) == share


def test_without_a_buffer_the_limit_itself_is_free() -> None:
    assert overlong_share(10, 10, 0) == 0 and overlong_share(11, 10, 0) == 1


@given(tokens=st.lists(st.integers(0, 3), max_size=20), ngram=st.integers(1, 4))
def test_repetition_is_a_share(tokens: list[int], ngram: int) -> None:
    share = repeated_share(np.array(tokens, np.int32), ngram)
    assert 0 <= share < 1
    assert repeated_share(np.arange(len(tokens), dtype=np.int32), ngram) == 0


def test_repetition_counts_runs_that_came_before() -> None:
    assert repeated_share(np.array([1, 2, 1, 2, 1], np.int32), 2) == 0.5  # 12 21 12 21


def test_parts_are_named_and_add_up() -> None:
    config = ShapingConfig(overlong_limit=10, overlong_buffer=4, overlong_penalty=2, repetition_ngram=1)
    found = shaped(RewardResult(reward=5.0, parts={"accuracy": 1.0}), np.zeros(8, np.int32), config)
    assert found.parts == {"accuracy": 1.0, "task": 5.0, "overlong": -1.0, "repetition": -0.875}
    assert found.reward == 5 - 1 - 0.875


def test_parts_are_weighed() -> None:
    result = RewardResult(reward=3.0, parts={"right": 2.0, "format": 1.0})
    found = shaped(result, TOKENS, ShapingConfig(weights={"format": 0.1, "absent": 7.0}))
    assert found.reward == pytest.approx(2.1) and found.parts == result.parts


def test_nothing_is_added_by_default_and_a_failure_stays_one() -> None:
    result = RewardResult(reward=1.0, parts={"accuracy": 1.0})
    assert shaped(result, TOKENS, ShapingConfig()) is result
    failed = RewardResult(failure="timed out")
    assert shaped(failed, TOKENS, ShapingConfig(overlong_limit=1)) is failed


def test_a_buffer_beyond_its_limit_is_refused() -> None:
    with pytest.raises(UserError, match="overlong_buffer"):
        RewardConfig.parse({"shaping": {"overlong_limit": 4, "overlong_buffer": 8}})


def test_a_scorer_shapes_what_it_scores() -> None:
    prompt = Prompt(uid="p", token_ids=TOKENS, text="", answer="yes")
    sample = Sample(key=SampleKey(0, 0), prompt=prompt, token_ids=TOKENS, text="yes")
    scorer = Scorer(RewardConfig(name="exact", workers=0, shaping=ShapingConfig(overlong_limit=5)))
    (found,) = asyncio.run(scorer.score([sample]))
    assert found.reward == 4 and found.parts["overlong"] == -1
