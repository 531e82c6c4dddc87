"""Soft actor-critic (SAC, arXiv 1812.05905) with automatic temperature, for robots with continuous actions.

Variants by settings: REDQ (arXiv 2101.05982) with `num_critics` 10 and `updates_per_turn` 20; RLPD (arXiv 2302.02948)
with `layer_norm` and `replay.demonstrations`, of which half of each batch is drawn; CrossQ (arXiv 1902.05605) with
`batch_norm`, which replaces the target critics.

Shapes: B = transitions of an update, N = critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from interlace.algorithms.replayed import CriticSettings, ReplayedAlgorithm

if TYPE_CHECKING:
    from torch import Tensor


class SACSettings(CriticSettings):
    """Settings of SAC."""

    policy_every: int = Field(default=1, ge=1)
    """Updates of the critics for each update of the policy and the temperature."""
    target_critics: int = Field(default=2, ge=1)
    """Critics whose minimum is the target; with more critics they are drawn for each update."""
    batch_norm: bool = False
    """True for CrossQ: the critics normalise their layers by the statistics of one batch of current and next states,
    and give their own targets, so that tau has no effect."""
    critic_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's moments for the critics; CrossQ takes 0.5 for the first."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """Weight of the entropy at the start."""
    temperature_lr: float = Field(default=3e-4, ge=0)
    """Learning rate of the temperature's logarithm (Adam). At 0, the temperature stays at its initial value."""
    target_entropy: float | None = None
    """Entropy of a chunk, in nats, to which the temperature leads the policy. If None, minus the chunk's numbers."""
    entropy_in_target: bool = True
    """False leaves the entropy out of the critics' targets, which RLPD does for sparse rewards."""

    @model_validator(mode="after")
    def _check_critic_counts(self) -> Self:
        if self.target_critics > self.num_critics:
            raise ValueError(
                f"target_critics = {self.target_critics} are drawn among num_critics = {self.num_critics}: lower it"
            )
        if self.batch_norm and self.layer_norm:
            raise ValueError("batch_norm and layer_norm normalise the same layers of the critics: remove one of them")
        if not all(0 <= beta < 1 for beta in self.critic_betas):
            raise ValueError(f"critic_betas = {list(self.critic_betas)}: give two numbers from 0 to below 1")
        return self


class SAC(ReplayedAlgorithm):
    """Critics with targets that contain the entropy, and a policy that maximises both."""

    Settings = SACSettings
    settings: SACSettings
    engine = "interlace.engines.train.actor_critic:ActorCriticEngine"
    heads = ("squashed",)
    has_priorities = True

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
    def policy_loss(values_B: Tensor, logprobs_B: Tensor, temperature: Tensor | float) -> Tensor:
        """Computes the policy's loss (eq. 9). values_B: value of the policy's actions, with gradient to the actions."""
        return (temperature * logprobs_B - values_B).mean()

    @staticmethod
    def temperature_loss(log_temperature: Tensor, logprobs_B: Tensor, target_entropy: float) -> Tensor:
        """Computes the loss of the temperature's logarithm (eq. 18, with the logarithm in place of the temperature)."""
        return -(log_temperature * (logprobs_B.detach() + target_entropy)).mean()
