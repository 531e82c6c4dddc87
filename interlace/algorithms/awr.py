"""Advantage-weighted regression (AWR, arXiv 1910.00177): imitation of replayed actions, weighted by their advantage.

A value function is fitted to the returns of the episodes, and the policy imitates each action with the exponential of
its return above the value. Works on demonstrations alone, on replayed episodes, and on both.

Shapes: B = transitions of an update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from interlace.algorithms.replayed import ReplayedAlgorithm, WeightedSettings

if TYPE_CHECKING:
    from torch import Tensor


class AWRSettings(WeightedSettings):
    """Settings of AWR."""

    n_step: int = Field(default=1000, ge=1)
    """Turns whose rewards a return sums before it takes the value. Above the length of an episode, the return is that
    of the whole rest of the episode."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the advantage in the exponent of an action's weight, in units of a return."""
    max_weight: float = Field(default=20.0, gt=0)
    """Largest weight of an action."""


class AWR(ReplayedAlgorithm):
    """A value function, and a policy by weighted imitation."""

    Settings = AWRSettings
    settings: AWRSettings
    engine = "interlace.engines.train.advantage_weighted:AdvantageWeightedEngine"

    def weights(self, advantages_B: Tensor) -> Tensor:
        """Computes the weights of replayed actions (eq. 10, bounded as in section 4)."""
        return (advantages_B / self.settings.temperature).exp().clamp(max=self.settings.max_weight)
