"""Soft actor-critic (SAC, arXiv 1812.05905) with automatic temperature, for robots with continuous actions.

Variants by settings: REDQ (arXiv 2101.05982) with `num_critics` 10 and `updates_per_turn` 20; RLPD (arXiv 2302.02948)
with `layer_norm` and `replay.demonstrations`, of which half of each batch is drawn.

Shapes: B = transitions of an update, N = critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import Field, model_validator

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.training import LossInputs, LossOutputs
    from interlace.core.types import SampleGroup


class SACSettings(AlgorithmConfig):
    """Settings of SAC. The policy's optimizer is the recipe's `optimizer`."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount from each turn of an episode to the next."""
    n_step: int = Field(default=1, ge=1)
    """Turns whose rewards a target sums before it takes the critics' value."""
    turns_per_update: int = Field(default=256, ge=1)
    """Transitions of an update."""
    updates_per_turn: float = Field(default=1.0, gt=0)
    """Updates of the critics for each turn that was added to the replay."""
    start_turns: int = Field(default=256, ge=1)
    """Turns in the replay before the first update."""
    policy_every: int = Field(default=1, ge=1)
    """Updates of the critics for each update of the policy and the temperature."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Share by which the target critics move to the critics in each update."""
    num_critics: int = Field(default=2, ge=1)
    """Critics that are trained."""
    target_critics: int = Field(default=2, ge=1)
    """Critics whose minimum is the target; with more critics they are drawn for each update."""
    critic_width: int = Field(default=256, ge=1)
    """Width of the critics' hidden layers."""
    critic_layers: int = Field(default=2, ge=1)
    """Hidden layers of each critic."""
    layer_norm: bool = False
    """True to normalise each hidden layer of the critics, as in RLPD."""
    critic_lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the critics (Adam)."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """Weight of the entropy at the start."""
    temperature_lr: float = Field(default=3e-4, ge=0)
    """Learning rate of the temperature's logarithm (Adam). At 0, the temperature stays at its initial value."""
    target_entropy: float | None = None
    """Entropy of a chunk, in nats, to which the temperature leads the policy. If None, minus the chunk's numbers."""
    entropy_in_target: bool = True
    """False leaves the entropy out of the critics' targets, which RLPD does for sparse rewards."""

    @model_validator(mode="after")
    def _targets_are_critics(self) -> Self:
        if self.target_critics > self.num_critics:
            raise ValueError(
                f"target_critics = {self.target_critics} are drawn among num_critics = {self.num_critics}: lower it"
            )
        return self


class SAC(Algorithm):
    """Trains from the replay alone: the samples of a step only enter the replay."""

    Settings = SACSettings
    settings: SACSettings

    @property
    def needs(self) -> Needs:
        return Needs(on_policy=False)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Returns zeros, which nothing reads."""
        return Advantages(advantages=[np.zeros(sample.num_tokens, np.float32) for sample in group.samples])

    def loss(self, inputs: LossInputs) -> LossOutputs:
        del inputs
        raise ValueError("SAC has no loss per token: its losses are of transitions (interlace/algorithms/sac.py)")

    @staticmethod
    def td_targets(
        rewards_B: Tensor, discounts_B: Tensor, values_B: Tensor, logprobs_B: Tensor, temperature: Tensor | float
    ) -> Tensor:
        """Computes the critics' targets [B] (eq. 3 of the paper).

        values_B: smallest value of the target critics at the next state and an action of the policy there.
        logprobs_B: log-prob of that action.
        """
        return rewards_B + discounts_B * (values_B - temperature * logprobs_B)

    @staticmethod
    def critic_loss(values_NB: Tensor, targets_B: Tensor) -> Tensor:
        """Computes half of the mean squared error, summed over the critics (eq. 5)."""
        return 0.5 * ((values_NB - targets_B) ** 2).mean(1).sum()

    @staticmethod
    def policy_loss(values_B: Tensor, logprobs_B: Tensor, temperature: Tensor | float) -> Tensor:
        """Computes the policy's loss (eq. 9). values_B: value of the policy's actions, with gradient to the actions."""
        return (temperature * logprobs_B - values_B).mean()

    @staticmethod
    def temperature_loss(log_temperature: Tensor, logprobs_B: Tensor, target_entropy: float) -> Tensor:
        """Computes the loss of the temperature's logarithm (eq. 18, with the logarithm in place of the temperature)."""
        return -(log_temperature * (logprobs_B.detach() + target_entropy)).mean()
