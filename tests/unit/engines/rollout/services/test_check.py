"""A server whose log-probs are not of the sampled distribution is refused before a run."""

import asyncio
import math
from collections.abc import Sequence

import pytest

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Request
from interlace.engines.rollout.services.check import WantedModel, check_logprobs
from interlace.engines.rollout.services.protocol import Delta, OnDelta

WANTED = WantedModel(vocab_size=64, num_tokens=16, dtype="float32", corrects_dtype=False, temperature=0.6)


class Server:
    """A server whose model gives each sampled token the same probability."""

    name = "http://server"

    def __init__(self, logprob: float, *, probability: float = 0.41, noise: float = 0.0) -> None:
        """logprob: of each sampled token; the last one differs by the noise. probability: of a token in the model."""
        self.logprob, self.probability, self.noise = logprob, probability, noise

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        for request in requests:
            count = request.params.max_new_tokens
            logprobs = [*[self.logprob] * (count - 1), self.logprob + self.noise]
            delta = Delta(token_ids=[5] * count, logprobs=logprobs, finish_reason=FinishReason.LENGTH)
            on_delta(request.id, delta)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-3.0, *[math.log(self.probability)] * (len(each) - 2)] for each in sequences]


def check(server: Server) -> None:
    asyncio.run(check_logprobs(server, WANTED))  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, -0.1])
def test_log_probs_without_the_temperature_are_refused(noise: float) -> None:
    """vLLM returns them by default, and each importance ratio was wrong. One noisy token hid them."""
    check(Server(0.0, noise=noise))  # sampled at a temperature near 0, a token is certain
    with pytest.raises(UserError, match=r"sampling.temperature=0.6, .*--logprobs-mode processed_logprobs"):
        check(Server(math.log(0.4), noise=noise))


def test_a_uniform_model_is_accepted() -> None:
    """Its log-probs are equal at each temperature, and it was refused."""
    check(Server(-math.log(64), probability=1 / 64))
