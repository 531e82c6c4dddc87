"""A server whose log-probs are not of the sampled distribution is refused before a run."""

import asyncio
import math
from collections.abc import Sequence

import pytest

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Request
from interlace.engines.rollout.services.check import check_logprobs
from interlace.engines.rollout.services.protocol import Delta, OnDelta


class Server:
    """A server whose model gives one token the probability 0.4. Sampled at a temperature near 0, it is certain."""

    name = "http://server"

    def __init__(self, mode: str) -> None:
        self.logprob = {"raw": math.log(0.4), "processed": 0.0}[mode]

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        for request in requests:
            count = request.params.max_new_tokens
            delta = Delta(token_ids=[5] * count, logprobs=[self.logprob] * count, finish_reason=FinishReason.LENGTH)
            on_delta(request.id, delta)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-3.0, *[math.log(0.41)] * (len(each) - 2)] for each in sequences]


def test_log_probs_without_the_temperature_are_refused() -> None:
    """vLLM returns them by default, and each importance ratio was wrong."""
    asyncio.run(check_logprobs(Server("processed"), 0.6))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sampling.temperature=0.6, .*--logprobs-mode processed_logprobs"):
        asyncio.run(check_logprobs(Server("raw"), 0.6))  # type: ignore[arg-type]
