"""A length ranker for simulated runs: its predictions have the rank correlation that the profile states."""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

from interlace.core.decode_costs import read_curve
from interlace.core.types import Metrics, Request
from interlace.forecast.costs.lengths import to_normal, uniforms
from interlace.forecast.profile.types import Lengths
from interlace.forecast.search.bounds import response_lengths
from interlace.schedule.lengths import rank_correlation

_NORMAL = NormalDist()
_NOISE = tuple(_NORMAL.inv_cdf((place + 0.5) / 32) for place in range(32))
"""Equally likely values of a standard normal variable."""
_SCORES = tuple(place / 8 for place in range(-32, 33))
KEPT = 1 << 12
"""Latest responses from which the reported rank correlation is computed."""


class NoisyRanker:
    """Predicts the length of each response from its true length and noise.

    The score of a response is a normal variable that is correlated with the normal score of its true length. The
    prediction is the mean length of all responses with that score, so a ranker with correlation 0 predicts the same
    length for every response, and a ranker with correlation 1 predicts the true length. The noise is keyed by the
    request: every schedule gets the same predictions.
    """

    def __init__(
        self, lengths: Lengths, max_new_tokens: int, true_length: Callable[[Request], float], seed: int
    ) -> None:
        """true_length: tokens until the response to a request ends, without the limit of `max_new_tokens`."""
        self._distribution = response_lengths(lengths, max_new_tokens)
        self._max_new_tokens, self._true_length, self._seed = max_new_tokens, true_length, seed
        # Of two normal variables with the correlation r, the rank correlation is 6 / pi asin(r / 2).
        self._correlation = 2 * math.sin(math.pi * lengths.rank_correlation / 6)
        self._curve = _compute_expectations(self._distribution, self._correlation)
        self._expected: dict[str, float] = {}
        self._pairs: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def expect(self, request: Request) -> float:
        owner = request.owner
        noise, _ = uniforms("rank", self._seed, request.uid, request.attempt, owner.index, request.turn)
        known = self._correlation
        score = known * self._normal_score(request) + math.sqrt(1 - known**2) * to_normal(noise)
        expected = read_curve(self._curve, min(score, _SCORES[-1]))
        self._expected.setdefault(request.id, expected)
        return expected

    def observe(self, request: Request, num_tokens: int) -> None:
        expected = self._expected.pop(request.id, None)
        if expected is not None:
            self._pairs.append((expected, float(num_tokens)))

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)

    def metrics(self) -> Metrics:
        if len(self._pairs) < 2:
            return {}
        expected, real = zip(*self._pairs, strict=True)
        return {"length_rank": rank_correlation(expected, real)}

    def _normal_score(self, request: Request) -> float:
        """Returns the standard normal value at the rank of a request's true length."""
        length, known = min(self._true_length(request), self._max_new_tokens), self._distribution
        rank = (bisect_left(known, length) + bisect_right(known, length)) / 2 / len(known)
        margin = 0.5 / len(known)
        return to_normal(min(max(rank, margin), 1 - margin))


@lru_cache(maxsize=8)
def _compute_expectations(distribution: Sequence[float], correlation: float) -> tuple[tuple[float, float], ...]:
    """Returns (score, mean length of the responses with this score), by rising score."""
    spread, last = math.sqrt(1 - correlation**2), len(distribution) - 1

    def length(normal: float) -> float:
        return distribution[min(last, int(_NORMAL.cdf(normal) * len(distribution)))]

    return tuple(
        (score, fmean([length(correlation * score + spread * noise) for noise in _NOISE])) for score in _SCORES
    )
