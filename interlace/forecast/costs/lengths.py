"""Lengths of simulated responses, keyed by the request: every schedule gets the same lengths."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from interlace.core.random import stable_hash
from interlace.forecast.profile.types import Lengths

_NORMAL = NormalDist()
_STEPS = 2**31


KEPT = 1 << 17
"""Draws of each kind that are cached: the planner simulates the same samples under many schedules."""


def uniforms(*key: int | str) -> tuple[float, float]:
    """Draws two independent numbers from (0, 1) for a key."""
    bits = stable_hash(*key)
    return (bits % _STEPS + 0.5) / _STEPS, (bits // _STEPS % _STEPS + 0.5) / _STEPS


def to_normal(uniform: float) -> float:
    """Turns a draw from (0, 1) into a standard normal one."""
    return _NORMAL.inv_cdf(uniform)


@lru_cache(maxsize=KEPT)
def of_prompt(seed: int, uid: str) -> float:
    """Returns the part of the length that all responses to a prompt share, as a standard normal draw."""
    return to_normal(uniforms("prompt", seed, uid)[0])


def interpolate(quantiles: Sequence[float], probability: float) -> float:
    """Returns the value at a probability, linear between the quantiles, which are evenly spaced."""
    place = probability * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (quantiles[high] - quantiles[low]) * (place - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLengths:
    """Number of tokens of a response without a length limit."""

    lengths: Lengths
    seed: int = 0

    def of(self, uid: str, attempt: int, index: int, turn: int = 0) -> float:
        """Returns the tokens of one turn; infinite if only a length limit ends it."""
        later = (turn,) if turn else ()
        mine, chance = uniforms("response", self.seed, uid, attempt, index, *later)
        settings = self.lengths
        by_prompt = settings.prompt_sigma * of_prompt(self.seed, uid) if settings.prompt_sigma else 0.0
        shift = by_prompt + settings.response_sigma * to_normal(mine)
        if settings.quantiles:
            return self._find_quantile(shift)
        return math.inf if chance < settings.cap_share else max(1, round(settings.median * math.exp(shift)))

    def _find_quantile(self, shift: float) -> float:
        """Returns the measured length at the rank of the shift among all responses."""
        settings = self.lengths
        spread = math.hypot(settings.prompt_sigma, settings.response_sigma)
        probability = _NORMAL.cdf(shift / spread) if spread else 0.5
        return max(1, round(interpolate(settings.quantiles, probability)))


@lru_cache(maxsize=4)
def cache_lengths(lengths: Lengths, seed: int) -> Callable[[str, int, int, int], float]:
    """Returns a cached ResponseLengths.of; the same function for the same arguments."""
    return lru_cache(maxsize=KEPT)(ResponseLengths(lengths=lengths, seed=seed).of)
