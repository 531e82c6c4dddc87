"""Features: the numbers that a policy sees of a simulator's state vector."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.types import BoolArray, FloatArray


class Feature(Config):
    """Numbers of a state vector, made ready for the policy: (of - minus - center) / scale."""

    of: tuple[int, ...] = Field(min_length=1)
    """Places in the simulator's state."""
    minus: tuple[int, ...] = ()
    """Places of as many numbers to take off, such as those of a goal."""
    center: tuple[float, ...] = ()
    """Numbers to take off, as many or none."""
    scale: tuple[float, ...] = (1.0,)
    """Divisors, as many or one for all."""
    squash: bool = False
    """True takes the hyperbolic tangent; else the result is cut off at -1 and 1."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for name, given in (("minus", self.minus), ("center", self.center), ("scale", self.scale)):
            if len(given) not in ({1, len(self.of)} if name == "scale" else {0, len(self.of)}):
                raise ValueError(f"{name} has {len(given)} numbers and `of` {len(self.of)}: give as many")
        return self


class StateFeatures:
    """Features one behind another, made of a state all at once: an episode's loop does this before each turn."""

    def __init__(self, features: Sequence[Feature]) -> None:
        """features: none leaves the state as it is."""
        self._is_plain = not features
        self._of = np.array([place for one in features for place in one.of], np.intp)
        self._minus = np.array([place for one in features for place in one.minus or one.of], np.intp)
        has_minus = _spread(features, lambda one: [float(bool(one.minus))])
        self._minus_weight: FloatArray = np.array(has_minus, np.float32)
        self._center: FloatArray = np.array(_spread(features, lambda one: one.center or [0.0]), np.float32)
        self._scale: FloatArray = np.array(_spread(features, lambda one: one.scale), np.float32)
        self._squashed: BoolArray = np.array(_spread(features, lambda one: [float(one.squash)]), np.bool_)

    def of(self, state: FloatArray) -> FloatArray:
        """Returns the numbers that the policy sees of a state, [F] of [D]."""
        if self._is_plain:
            return state
        values = state[self._of]
        values -= state[self._minus] * self._minus_weight
        values -= self._center
        values /= self._scale
        return np.where(self._squashed, np.tanh(values), np.minimum(np.maximum(values, -1), 1))


def _spread(features: Sequence[Feature], numbers: Callable[[Feature], Sequence[float]]) -> list[float]:
    """Lists a number for each place: a feature's own, or the one that it has for all of its places."""
    found: list[float] = []
    for one in features:
        own = list(numbers(one))
        found += own if len(own) == len(one.of) else own * len(one.of)
    return found
