"""Implicit Q-learning (IQL, arXiv 2110.06169): offline from demonstrations, then online from the replay.

A value function is fitted to an upper expectile of the critics at recorded actions, so that no action outside the data
is ever evaluated. The policy imitates recorded actions, weighted by the exponential of their advantage.

Shapes: B = transitions of an update, N = critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from interlace.algorithms.replayed import CriticSettings, ReplayedAlgorithm, WeightedSettings

if TYPE_CHECKING:
    from torch import Tensor


class IQLSettings(WeightedSettings, CriticSettings):
    """Settings of IQL."""

    expectile: float = Field(default=0.7, gt=0, lt=1)
    """Expectile of the critics that the value approaches. At 0.5 it is their mean over the data's actions."""
    inverse_temperature: float = Field(default=3.0, gt=0)
    """Factor of the advantage in the exponent of an action's weight."""


class IQL(ReplayedAlgorithm):
    """Critics, a value function at an expectile, and a policy by weighted imitation."""

    Settings = IQLSettings
    settings: IQLSettings
    engine = "interlace.engines.train.advantage_weighted:ImplicitQEngine"

    def value_loss(self, gaps_B: Tensor) -> Tensor:
        """Computes the asymmetric squared error (eq. 5). gaps_B: critics' value of the action minus the value."""
        weights_B = abs(self.settings.expectile - (gaps_B.detach() < 0).float())
        return (weights_B * gaps_B**2).mean()

    def weights(self, advantages_B: Tensor) -> Tensor:
        """Computes the weights of recorded actions (eq. 7), bounded by `max_weight`."""
        return (self.settings.inverse_temperature * advantages_B).exp().clamp(max=self.settings.max_weight)
