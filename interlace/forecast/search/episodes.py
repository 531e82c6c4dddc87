"""Tokens and waits of a mean episode, for the analytic estimates of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from interlace.forecast.costs.lengths import interpolate
from interlace.forecast.profile.types import Turns


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeModel:
    """Sizes of an episode. A response without turns is an episode of one turn."""

    lengths: Sequence[float]
    """Generated tokens of an episode at evenly spaced probabilities, ascending."""
    turns: float
    """Mean number of turns."""
    trained_tokens: float
    """Mean number of tokens of a sample that training reads."""
    context_tokens: float
    """Mean number of tokens of the context during generation, without the first prompt."""
    prefill_tokens: float
    """Mean number of tokens that engines compute in addition to the first prompt and the generated tokens."""
    tool_s: float
    """Seconds between the turns of the longest episode."""

    @classmethod
    def of(cls, responses: Sequence[float], prompt_tokens: int, turns: Turns | None, *, has_envs: bool) -> Self:
        """responses: tokens of a response at evenly spaced probabilities, ascending.

        has_envs: each turn has a separate context, which begins with the prompt and an observation. Otherwise a context
        contains all earlier turns.
        """
        mean = fmean(responses)
        if turns is None:
            return cls(
                lengths=responses,
                turns=1.0,
                trained_tokens=prompt_tokens + mean,
                context_tokens=mean / 2,
                prefill_tokens=0.0,
                tool_s=0.0,
            )
        given, count = fmean(turns.given_tokens), fmean(max(1.0, each) for each in turns.turns)
        chances = [(place + 0.5) / len(responses) for place in range(len(responses))]
        counts = [max(1.0, interpolate(turns.turns, chance)) for chance in chances]
        # The standard deviation of a sum of n responses grows with the square root of n.
        lengths = [
            number * mean + math.sqrt(number) * (length - mean)
            for number, length in zip(counts, responses, strict=True)
        ]
        return cls(
            lengths=lengths,
            turns=count,
            trained_tokens=count * (prompt_tokens + given + mean)
            if has_envs
            else prompt_tokens + count * mean + (count - 1) * given,
            context_tokens=mean / 2 + (0.0 if has_envs else (count - 1) / 2 * (mean + given)),
            prefill_tokens=(count - 1) * (given + (prompt_tokens if has_envs else 0.0)),
            tool_s=0.0 if has_envs else (counts[-1] - 1) * fmean(turns.tool_s),
        )
