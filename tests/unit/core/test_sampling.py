"""Sampling parameters outside the range of a float32, or of an engine's arrays, are refused."""

import math

import pytest
from pydantic import ValidationError

from interlace.core.sampling import LARGEST, SamplingParams


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e39},
        {"presence_penalty": -1e300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e39},
        {"top_k": 2**70},
        {"max_new_tokens": 2**40},
        {"stop_token_ids": (2**40,)},
        {"logit_bias": ((5, 1e39),)},
        {"logit_bias": ((5, -1e39),)},
        {"logit_bias": ((5, math.nan),)},
        {"logit_bias": ((5, math.inf),)},
        {"logit_bias": ((2**40, 1.0),)},
    ],
)
def test_a_value_that_overflows_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_the_bounds_themselves_and_a_forbidden_token_are_accepted() -> None:
    biases = ((1, LARGEST), (2, -LARGEST), (3, -math.inf))
    assert SamplingParams(temperature=LARGEST, presence_penalty=-LARGEST, logit_bias=biases).logit_bias == biases
