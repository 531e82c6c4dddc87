"""Simulated predictions of lengths have the rank correlation that the profile states."""

import pytest

from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.forecast.costs.lengths import cache_lengths
from interlace.forecast.costs.ranker import NoisyRanker
from interlace.forecast.profile.types import Lengths
from interlace.schedule.lengths import rank_correlation

LIMIT = 8192
PARAMS = SamplingParams(max_new_tokens=LIMIT)
REQUESTS = [
    Request(uid=f"p{number % 500}", owner=SampleKey(number, number // 500), prompt_ids=[0], params=PARAMS)
    for number in range(3000)
]


def predictions(correlation: float, **fields: float) -> tuple[list[float], list[float]]:
    """Returns the predicted and the true length of each request."""
    lengths = Lengths(median=700, rank_correlation=correlation, **fields)
    draw = cache_lengths(lengths, 0)

    def true_length(request: Request) -> float:
        return draw(request.uid, request.attempt, request.owner.index, request.turn)

    ranker = NoisyRanker(lengths, LIMIT, true_length, 0)
    return [ranker.expect(each) for each in REQUESTS], [min(LIMIT, true_length(each)) for each in REQUESTS]


@pytest.mark.parametrize("correlation", [0.25, 0.5, 0.75, 0.95])
def test_predictions_have_the_stated_rank_correlation_and_the_true_mean(correlation: float) -> None:
    predicted, real = predictions(correlation)
    assert rank_correlation(predicted, real) == pytest.approx(correlation, abs=0.04)
    assert sum(predicted) == pytest.approx(sum(real), rel=0.05)


def test_without_correlation_every_response_is_predicted_alike_and_with_full_correlation_exactly() -> None:
    assert len(set(predictions(0.0)[0])) == 1
    predicted, real = predictions(1.0, cap_share=0.05)
    assert rank_correlation(predicted, real) > 0.995
    assert max(predicted) == LIMIT
