"""Features: the numbers of a simulator's state vector that the policy sees."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.types import FloatArray


class Feature(Config):
    """Transformed numbers of a state vector: (of - minus - center) / scale."""

    of: tuple[int, ...] = Field(min_length=1)
    """Indices into the simulator's state."""
    minus: tuple[int, ...] = ()
    """Indices of the numbers to subtract, such as the goal's; as many as `of`, or none."""
    center: tuple[float, ...] = ()
    """Constants to subtract; as many as `of`, or none."""
    scale: tuple[float, ...] = (1.0,)
    """Divisors; as many as `of`, or one for all."""
    squash: bool = False
    """True to apply the hyperbolic tangent to the result; else it is clipped to -1 ... 1."""

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name, given in (("minus", self.minus), ("center", self.center), ("scale", self.scale)):
            if len(given) not in ({1, len(self.of)} if name == "scale" else {0, len(self.of)}):
                raise ValueError(f"{name} has {len(given)} numbers and `of` {len(self.of)}: give as many")
        if 0 in self.scale:
            raise ValueError(f"scale = {list(self.scale)} divides by 0: give the size of the number's usual change")
        return self


class StateFeatures:
    """Concatenated features, computed from a state in one vectorized pass before each turn."""

    def __init__(self, features: Sequence[Feature]) -> None:
        """features: if empty, the state is not changed."""
        self._is_plain = not features
        self._of = np.array([place for one in features for place in one.of], np.intp)
        self._minus = np.array([place for one in features for place in one.minus or one.of], np.intp)
        self._minus_weight = _spread_numbers(features, [[float(bool(one.minus))] for one in features])
        self._center = _spread_numbers(features, [one.center or [0.0] for one in features])
        self._scale = _spread_numbers(features, [one.scale for one in features])
        self._squashed = _spread_numbers(features, [[float(one.squash)] for one in features]) > 0

    def of(self, state: FloatArray) -> FloatArray:
        """Returns the features [F] of a state [D]."""
        if self._is_plain:
            return state
        values = state[self._of]
        values -= state[self._minus] * self._minus_weight
        values -= self._center
        values /= self._scale
        return np.where(self._squashed, np.tanh(values), np.minimum(np.maximum(values, -1), 1))


def _spread_numbers(features: Sequence[Feature], numbers: Sequence[Sequence[float]]) -> FloatArray:
    """Returns one number per index: the numbers of a feature, or its single number repeated."""
    spread = [
        np.broadcast_to(np.asarray(given, np.float32), len(one.of))
        for one, given in zip(features, numbers, strict=True)
    ]
    return np.concatenate(spread) if spread else np.zeros(0, np.float32)
