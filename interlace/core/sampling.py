"""Sampling parameters of a request."""

import math
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from interlace.core.config import Config

MIN_TEMPERATURE = 1e-6
"""Smallest temperature above 0. Below it, gradients and logits divided by it exceed the range of a float32."""
LARGEST = 1e4
"""Largest temperature, penalty and bias: products of these and a model's logits stay within the range of a float32."""
LARGEST_INT32 = 2**31 - 1
"""Largest token id and count that an engine's arrays hold."""
MAX_STOP_TOKENS = 256
"""Most stop tokens of a request. An engine compares each sampled token of every request with as many ids as the request
with the most stop tokens has."""

MAX_STOPS, MAX_STOP_LENGTH = 1024, 8192
"""Most stop texts of a request, and most characters of one. After each sampled token, an engine searches for all of
them in as many tokens as the longest one may have."""

TokenId = Annotated[int, Field(ge=0, le=LARGEST_INT32)]


class SamplingParams(Config):
    """Distribution that tokens are sampled from, and the end of a response. Serving engines use the same names."""

    max_new_tokens: int = Field(default=256, ge=1, le=LARGEST_INT32)
    temperature: float = Field(default=1.0, ge=0, le=LARGEST)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=LARGEST_INT32)
    """0 keeps the whole vocabulary."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens less probable than this share of the most probable token are cut off. top_p counts the remaining ones."""
    repetition_penalty: float = Field(default=1.0, ge=1 / LARGEST, le=LARGEST)
    presence_penalty: float = Field(default=0.0, ge=-LARGEST, le=LARGEST)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKENS)
    """Generation ends with one of these; the response keeps it as its last token."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...] = Field(
        default=(), max_length=MAX_STOPS
    )
    """Generation ends when the decoded response contains one of these."""
    logit_bias: tuple[tuple[TokenId, Annotated[float, Field(le=LARGEST, allow_inf_nan=True)]], ...] = ()
    """(token id, added logit) pairs; minus infinity forbids a token."""
    raw_logprobs: bool = False
    """Also return the log-probs of the model itself: temperature 1, no truncation, no penalty."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                "logits divided by it exceed the range of a float32; set it to "
                f"{MIN_TEMPERATURE:g} or more, or to 0 for greedy decoding"
            )
        return temperature

    @model_validator(mode="after")
    def _check_biases(self) -> Self:
        for token, bias in self.logit_bias:
            if not (-LARGEST <= bias <= LARGEST or bias == -math.inf):
                raise ValueError(
                    f"logit_bias of token {token} = {bias}: it must be a number from {-LARGEST:g} to {LARGEST:g}, or "
                    "-inf, which forbids the token"
                )
        return self
