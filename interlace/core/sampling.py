"""How tokens are drawn."""

import math
from typing import Annotated

from pydantic import Field, field_validator

from interlace.core.config import Config

MIN_TEMPERATURE = 1e-6
"""Above 0. Below, gradients and then logits divided by it leave what a float32 can hold."""


class SamplingParams(Config):
    """How tokens are drawn. The names are those of serving engines."""

    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with one of these; it is kept as the response's last token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Generation ends when the decoded response contains one of these."""
    logit_bias: tuple[tuple[int, Annotated[float, Field(lt=math.inf, allow_inf_nan=True)]], ...] = ()
    """(token id, added logit) pairs; minus infinity forbids a token."""
    raw_logprobs: bool = False
    """Also return the log-probs of the model itself: temperature 1, nothing cut off, no penalty."""

    @field_validator("temperature")
    @classmethod
    def _divides_logits(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                "what is divided by it leaves the range of a float32; set it to "
                f"{MIN_TEMPERATURE:g} or more, or to 0 for greedy decoding"
            )
        return temperature
