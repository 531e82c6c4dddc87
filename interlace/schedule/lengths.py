"""Predictions of response lengths, for dispatch by length and for budgets that are shares of a length."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from interlace.core.types import Metrics, Request

FORGETTING = 0.998
"""Decay of earlier observations per response, because lengths drift as the policy is trained."""
PRIOR = 4.0
"""Weight of the prior, in responses, for the estimate of one prompt token."""
ENOUGH = 64
"""Responses that the ranker must have observed before its predictions are used."""
KEPT_GROUPS = 1 << 12
"""Number of groups whose finished siblings are remembered."""
MEAN_OF = 1 << 10
"""Number of responses in a mean length, because lengths drift as the policy is trained."""
SCORED = 1 << 12
"""Number of latest responses in the reported rank correlation."""


class LengthPredictor(Protocol):
    """Predicts the number of response tokens of a request."""

    def expect(self, request: Request) -> float:
        """Returns the predicted number of response tokens of a dispatched request."""

    def observe(self, request: Request, num_tokens: int) -> None:
        """Updates the predictions from a response that ended."""

    def forget(self, request_id: str) -> None:
        """Removes a request that gets no response."""

    def metrics(self) -> Metrics:
        """Returns metrics of the quality of the predictions."""


class MeanLength:
    """Mean length of the latest responses."""

    def __init__(self, first_guess: float) -> None:
        """first_guess: tokens to predict until a response has ended."""
        self.tokens, self._count = first_guess, 0

    def observe(self, num_tokens: int) -> None:
        self._count = min(self._count + 1, MEAN_OF)
        self.tokens += (num_tokens - self.tokens) / self._count


class LengthHistory:
    """Mean length of earlier responses to the same prompt. For a new prompt, scales with the length of the prompt."""

    def __init__(self, first_guess: float) -> None:
        """first_guess: tokens to predict until a response has ended."""
        self._first_guess = first_guess
        self._of_prompt: dict[str, tuple[int, int]] = {}
        self._responses = self._response_tokens = self._prompt_tokens = 0

    def observe(self, uid: str, prompt_tokens: int, response_tokens: int) -> None:
        """Adds the length of a response that ended."""
        count, total = self._of_prompt.get(uid, (0, 0))
        self._of_prompt[uid] = (count + 1, total + response_tokens)
        self._responses += 1
        self._response_tokens += response_tokens
        self._prompt_tokens += prompt_tokens

    def of_prompt(self, uid: str) -> float | None:
        """Returns the mean length of responses to a prompt. Returns None if none has ended."""
        count, total = self._of_prompt.get(uid, (0, 0))
        return total / count if count else None

    def expect(self, uid: str, prompt_tokens: int) -> float:
        known = self.of_prompt(uid)
        if known is not None:
            return known
        if not self._responses:
            return self._first_guess
        return self._response_tokens / self._responses * (prompt_tokens * self._responses / self._prompt_tokens)


class _Guess(NamedTuple):
    """Features of a request at its dispatch, and its predicted lengths."""

    features: tuple[float, ...]
    expected: float
    of_history: float


class LengthRanker:
    """Length predicted from a prompt's history, its group's finished siblings, its tokens and its length.

    A linear model of log length is updated with each response (recursive least squares), so each feature is weighted by
    its accuracy. StreamRL (arXiv 2504.15930) trains a language model for the same purpose; Seer (2511.14617) uses the
    siblings. Until the model has learned enough, and if lengths only balance engines, the history is used.
    """

    def __init__(self, first_guess: float, *, learns: bool) -> None:
        """first_guess: tokens to predict until a response has ended. learns: if False, only the history is used."""
        self._history, self._learns = LengthHistory(first_guess), learns
        self._siblings: dict[int, tuple[int, float]] = {}
        self._tokens: dict[int, tuple[int, float]] = {}
        """Prompt token -> number of responses, and sum of the deviations of their log length from the mean."""
        self._mean, self._num_observed = math.log(max(1.0, first_guess)), 0
        self._model = _LeastSquares(len(_NOTHING))
        self._guesses: dict[str, _Guess] = {}
        self._scored: deque[tuple[float, float, float]] = deque(maxlen=SCORED)

    def expect(self, request: Request) -> float:
        of_history = self._history.expect(request.uid, len(request.prompt_ids))
        if not self._learns:
            return of_history
        features = self._compute_features(request)
        expected = of_history
        if self._num_observed >= ENOUGH:
            expected = math.exp(min(25.0, self._mean + self._model.predict(features)))
        self._guesses.setdefault(request.id, _Guess(features, expected, of_history))
        return expected

    def observe(self, request: Request, num_tokens: int) -> None:
        self._history.observe(request.uid, len(request.prompt_ids), num_tokens)
        if not self._learns:
            return
        length = math.log(max(1, num_tokens))
        self._num_observed += 1
        self._mean += (length - self._mean) / min(self._num_observed, 1000)
        if guess := self._guesses.pop(request.id, None):
            self._model.fit(guess.features, length - self._mean)
            self._scored.append((guess.expected, guess.of_history, float(num_tokens)))
        for token in set(request.list_prompt()):
            count, total = self._tokens.get(token, (0, 0.0))
            self._tokens[token] = (count + 1, total + length - self._mean)
        count, total = self._siblings.pop(request.owner.gid, (0, 0.0))
        self._siblings[request.owner.gid] = (count + 1, total + length)
        if len(self._siblings) > KEPT_GROUPS:
            del self._siblings[next(iter(self._siblings))]

    def forget(self, request_id: str) -> None:
        self._guesses.pop(request_id, None)

    def metrics(self) -> Metrics:
        """Returns the rank correlation of predicted and real lengths, for the model and for the history alone."""
        if not self._learns or len(self._scored) < 2:
            return {}
        expected, of_history, real = zip(*self._scored, strict=True)
        return {
            "length_rank": rank_correlation(expected, real),
            "length_rank_of_history": rank_correlation(of_history, real),
        }

    def _compute_features(self, request: Request) -> tuple[float, ...]:
        known = self._history.of_prompt(request.uid)
        count, total = self._siblings.get(request.owner.gid, (0, 0.0))
        of_tokens = [self._tokens[token] for token in set(request.list_prompt()) if token in self._tokens]
        said = sum(total / (count + PRIOR) for count, total in of_tokens) / max(1, len(of_tokens))
        return (
            1.0,
            math.log(max(1, len(request.prompt_ids))) - 4.0,
            0.0 if known is None else math.log(max(1.0, known)) - self._mean,
            count / (count + 1) * (total / count - self._mean) if count else 0.0,
            10 * said,
        )


_NOTHING = (0.0,) * 5


class _LeastSquares:
    """Weights of a linear model, updated with each observation. Older observations decay exponentially."""

    def __init__(self, size: int) -> None:
        self._weights = [0.0] * size
        self._covariance = [[10.0 * (row == column) for column in range(size)] for row in range(size)]

    def predict(self, features: Sequence[float]) -> float:
        return sum([weight * value for weight, value in zip(self._weights, features, strict=True)])

    def fit(self, features: Sequence[float], value: float) -> None:
        spread = self._covariance
        projected = [sum([each * feature for each, feature in zip(row, features, strict=True)]) for row in spread]
        scale = FORGETTING + sum([one * two for one, two in zip(features, projected, strict=True)])
        error = value - self.predict(features)
        self._weights = [weight + error * one / scale for weight, one in zip(self._weights, projected, strict=True)]
        # Bounded, because the covariance of a feature that is always 0 would grow without limit.
        self._covariance = [
            [
                min(1e3, max(-1e3, (each - one * two / scale) / FORGETTING))
                for each, two in zip(row, projected, strict=True)
            ]
            for row, one in zip(spread, projected, strict=True)
        ]


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float:
    """Computes Spearman's rank correlation.

    Equal values share their mean rank. Returns 0 if either list is constant.
    """
    first, second = _rank_values(one), _rank_values(two)
    middle = (len(first) - 1) / 2
    dot = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    norm = math.sqrt(sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second))
    return dot / norm if norm else 0.0


def _rank_values(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + end - 1) / 2
        start = end
    return ranks
