"""Common parts of policy-gradient algorithms: surrogate, off-policy correction, KL to the reference, entropy bonus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, model_validator

from interlace.algorithms.advantages import kl_penalty, select_trained, whitened
from interlace.algorithms.base import Algorithm, AlgorithmConfig, Needs, advantages_of, rewards_of
from interlace.algorithms.losses import (
    KLEstimator,
    Surrogate,
    clipped_surrogate,
    importance_ratio,
    kl_divergence,
    turn_ratio,
)
from interlace.algorithms.off_policy import OffPolicyConfig
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import FloatArray, Sample, SampleGroup

if TYPE_CHECKING:
    from torch import Tensor


class PolicySettings(AlgorithmConfig):
    """Settings of every policy-gradient algorithm."""

    clip_low: NonNegativeFloat = 0.2
    """The importance ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The importance ratio is clipped above 1 + clip_high."""
    ratio_of: Literal["token", "turn"] = "token"
    """Unit whose importance ratio is clipped. `turn`: the product over an episode's turn, such as a robot's chunk."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with negative advantage at this many times their advantage."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss. Above 0, the reference is needed."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL in the loss and in the metric. k1 is for the metric alone: as a loss, its gradient does not
    depend on the reference."""
    kl_reward_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference that is subtracted from the reward. Above 0, the reference is needed."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    off_policy: OffPolicyConfig = OffPolicyConfig()

    @model_validator(mode="after")
    def _refuse_kl_without_gradient(self) -> Self:
        if self.kl_coefficient and self.kl_estimator == "k1":
            raise ValueError(
                f"kl_coefficient = {self.kl_coefficient:g} with kl_estimator = 'k1': the gradient of k1 does not "
                "depend on the reference, so nothing would keep the policy near it. Take k3, k2 or k3+, or put the KL "
                "into the reward with kl_reward_coefficient"
            )
        return self


class PolicyAlgorithm(Algorithm):
    """Base of policy-gradient algorithms. A subclass defines the advantages, and often `ratio` or `surrogate`."""

    Settings = PolicySettings
    settings: PolicySettings

    @property
    def whitens_batch(self) -> bool:
        """True if advantages are whitened over the whole batch. A subclass may set it as `whitens_batch = True`."""
        return False

    @property
    def needs(self) -> Needs:
        return Needs(
            batch_statistics=self.whitens_batch,
            reference=self.settings.kl_coefficient > 0 or self.settings.kl_reward_coefficient > 0,
            proximal_logprobs=self.settings.off_policy.proximal == "recomputed",
        )

    def rewards(self, group: SampleGroup) -> FloatArray:
        """Returns [G] rewards minus the KL penalty summed over each sample's trained tokens."""
        coefficient = self.settings.kl_reward_coefficient
        if coefficient == 0:
            return rewards_of(group)
        penalties = [select_trained(kl_penalty(sample, coefficient), sample).sum() for sample in group.samples]
        return rewards_of(group) - np.array(penalties, np.float32)

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        advantages = advantages_of(samples)
        return whitened(advantages, [sample.loss_mask for sample in samples]) if self.whitens_batch else advantages

    def ratio(self, inputs: LossInputs, proximal_T: Tensor) -> Tensor:
        """Computes the [T] importance ratios of tokens or turns, with gradient."""
        if self.settings.ratio_of == "turn":
            return turn_ratio(inputs, proximal_T)
        return importance_ratio(inputs.logprobs_T, proximal_T)

    def surrogate(self, inputs: LossInputs, proximal_T: Tensor) -> Surrogate:
        """Computes the loss of each token. proximal_T: log-probs in the denominator of the ratios."""
        return clipped_surrogate(
            self.ratio(inputs, proximal_T),
            inputs.advantages_T,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            dual_clip=self.settings.dual_clip,
        )

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes weight x surrogate + kl_coefficient x KL - entropy_coefficient x entropy.

        Raises ValueError if kl_coefficient is set and the reference's log-probs are missing.
        """
        settings = self.settings
        if settings.kl_coefficient and inputs.ref_logprobs_T is None:
            raise ValueError(f"kl_coefficient = {settings.kl_coefficient:g} and the samples have no ref_logprobs")
        proximal_T = settings.off_policy.proximal_logprobs(inputs)
        surrogate = self.surrogate(inputs, proximal_T)
        metrics_T = {"clip_fraction": surrogate.clipped_T.float()}
        correction = settings.off_policy.correct(inputs, proximal_T)
        loss_T = surrogate.loss_T if correction is None else surrogate.loss_T * correction.weights_T
        if correction is not None:
            metrics_T["correction_fraction"] = correction.changed_T.float()
        if inputs.ref_logprobs_T is not None:
            kl_T = kl_divergence(inputs.logprobs_T, inputs.ref_logprobs_T, settings.kl_estimator)
            metrics_T["ref_kl"] = kl_T.detach()
            if settings.kl_coefficient:
                loss_T = loss_T + settings.kl_coefficient * kl_T
        if settings.entropy_coefficient:
            loss_T = loss_T - settings.entropy_coefficient * inputs.entropy_T
        return LossOutputs(loss_T=loss_T, metrics_T=metrics_T)


class GroupSettings(PolicySettings):
    """Settings of algorithms that compare the samples of a prompt with one another."""

    drop_zero_variance: bool = False
    """Dynamic sampling: a group of equal rewards gives no gradient, so it ends as `filtered` and is replaced. The
    rewards include shaping and exclude the KL of `kl_reward_coefficient`, which would be computed for dropped groups
    too (verl's `filter_groups.metric: seq_reward`)."""


class OwnRatioSettings(GroupSettings):
    """Settings of algorithms whose loss defines the unit of its ratio, so that ratio_of would have no effect."""

    @model_validator(mode="after")
    def _refuse_ratio_of(self) -> Self:
        if self.ratio_of != "token":
            raise ValueError(
                f"ratio_of = {self.ratio_of!r} sets the unit of the clipped ratio, and this algorithm has a fixed "
                "unit, which it would not change; leave it out, or take an algorithm such as grpo"
            )
        return self


class OwnSurrogateSettings(OwnRatioSettings):
    """Settings of algorithms whose loss is not PPO's clipped one, so that dual_clip would have no effect."""

    @model_validator(mode="after")
    def _refuse_dual_clip(self) -> Self:
        if self.dual_clip is not None:
            raise ValueError(
                f"dual_clip = {self.dual_clip:g} bounds PPO's clipped loss, and this algorithm has another loss, "
                "which it would not change; leave it out"
            )
        return self


class GroupAlgorithm(PolicyAlgorithm):
    """Advantages relative to the group."""

    Settings = GroupSettings
    settings: GroupSettings

    @property
    def is_group_relative(self) -> bool:
        return True

    @property
    def selects(self) -> bool:
        return self.settings.drop_zero_variance or type(self).keeps is not GroupAlgorithm.keeps

    def keeps(self, group: SampleGroup) -> bool:
        # In float32, as advantages are: 0.1 + 0.2 and 0.3 are equal there.
        rewards_G = rewards_of(group)
        return bool((rewards_G != rewards_G[:1]).any()) or not self.settings.drop_zero_variance
