"""On-policy distillation (arXiv 2306.13649; sampled reverse KL as in arXiv 2606.24143): the student samples, a teacher
scores each token.

The teacher is the reference role: a model, several models, or the policy at the start that reads more context. The
log-ratio to the teacher is recomputed under the current student at each update, so it is right for stale samples too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from interlace.algorithms.advantages import group_normalized, per_token
from interlace.algorithms.base import Advantages, Needs
from interlace.algorithms.losses import KLEstimator, Surrogate, kl_divergence
from interlace.algorithms.policy import PolicyAlgorithm, PolicySettings
from interlace.core.training import LossInputs, LossOutputs
from interlace.observe.headline import Headline

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.types import SampleGroup


TINY = 1e-7
"""Smallest probability of all other tokens together."""


class DistillSettings(PolicySettings):
    """Settings of the signal."""

    signal: Literal["advantage", "loss", "top_k"] = "advantage"
    """advantage: log teacher - log student is the advantage of each token, under the clipped loss. loss: the KL by
    `kl_estimator` is the loss itself, weighted by the importance ratio, at most 1 + clip_high. top_k: the loss is the
    forward KL over the teacher's most probable tokens."""
    teacher_top_k: int = Field(default=16, ge=1)
    """Most probable tokens of the teacher at each place, for `signal: top_k`. The other tokens count as one."""
    teacher_coefficient: float = Field(default=1.0, gt=0)
    """Weight of the teacher's signal."""
    max_log_ratio: float = Field(default=10.0, gt=0)
    """Bound of log teacher - log student of a token, in nats."""
    reward_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the reward's advantage, normalized in its group as in grpo; 0 trains on the teacher alone."""
    kl_estimator: KLEstimator = "k2"
    """Estimator of `signal: loss`. The gradient of k2 is the gradient of the reverse KL."""

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_coefficient or self.kl_reward_coefficient:
            raise ValueError(
                "kl_coefficient and kl_reward_coefficient measure to the reference, which is the teacher here; set "
                "teacher_coefficient instead"
            )
        if self.signal == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "signal = 'loss' with kl_estimator = 'k1': the gradient of k1 does not depend on the teacher, so "
                "nothing would be learned. Take k2, or signal advantage"
            )
        for name, signal in {"teacher_top_k": "top_k", "max_log_ratio": "advantage", "kl_estimator": "loss"}.items():
            value = getattr(self, name)
            if self.signal != signal and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value!r} is of signal {signal!r} and has no effect with signal {self.signal!r}; remove "
                    "it, or change signal"
                )
        return self


class Distill(PolicyAlgorithm):
    """Minimizes the reverse KL from the student to the teacher on the student's samples, with or without a reward."""

    Settings = DistillSettings
    settings: DistillSettings

    @property
    def needs(self) -> Needs:
        is_recomputed = self.settings.off_policy.proximal == "recomputed"
        return Needs(
            reference=True,
            teacher=True,
            teacher_top=self.settings.teacher_top_k if self.settings.signal == "top_k" else 0,
            reward=self.settings.reward_coefficient > 0,
            proximal_logprobs=is_recomputed,
        )

    @property
    def is_group_relative(self) -> bool:
        return self.settings.reward_coefficient > 0

    @property
    def headline(self) -> Headline:
        """Returns the distance to the teacher, unless the loss contains the reward."""
        if self.settings.reward_coefficient:
            return super().headline
        metric = "teacher_forward_kl" if self.settings.signal == "top_k" else "teacher_kl"
        return Headline(metric=f"actor/{metric}", name="teacher KL", digits=4)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Computes the advantages of the reward; the loss adds the teacher's advantages."""
        if not self.settings.reward_coefficient:
            return Advantages(advantages=per_token(np.zeros(len(group.samples), np.float32), group.samples))
        advantages_G = self.settings.reward_coefficient * group_normalized(self.rewards(group), scale_by_std=True)
        return Advantages(advantages=per_token(advantages_G, group.samples))

    def surrogate(self, inputs: LossInputs, proximal_T: Tensor) -> Surrogate:
        """Computes the loss of each token. Raises ValueError if the teacher's log-probs are missing."""
        settings, teacher_T = self.settings, inputs.ref_logprobs_T
        if teacher_T is None:
            raise ValueError("distill learns from a teacher, and the samples have no ref_logprobs")
        if settings.signal == "top_k":
            surrogate = super().surrogate(inputs, proximal_T)
            return replace(surrogate, loss_T=surrogate.loss_T + settings.teacher_coefficient * _forward_kl(inputs))
        if settings.signal == "loss":
            surrogate = super().surrogate(inputs, proximal_T)
            # An estimate from a sampled token is of the policy that sampled it.
            weights_T = self.ratio(inputs, proximal_T).detach().clamp(max=1 + settings.clip_high)
            kl_T = weights_T * kl_divergence(inputs.logprobs_T, teacher_T, settings.kl_estimator)
            return replace(surrogate, loss_T=surrogate.loss_T + settings.teacher_coefficient * kl_T)
        gap_T = (teacher_T - inputs.logprobs_T.detach()).clamp(-settings.max_log_ratio, settings.max_log_ratio)
        advantages_T = inputs.advantages_T + settings.teacher_coefficient * gap_T
        return super().surrogate(replace(inputs, advantages_T=advantages_T), proximal_T)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Adds the metric teacher_kl: the mean of log student - log teacher over the sampled tokens."""
        outputs = super().loss(inputs)
        metrics_T = {name: values_T for name, values_T in outputs.metrics_T.items() if name != "ref_kl"}
        if inputs.ref_logprobs_T is not None:
            metrics_T["teacher_kl"] = inputs.logprobs_T.detach() - inputs.ref_logprobs_T
        if inputs.policy_top_TK is not None:
            metrics_T["teacher_forward_kl"] = _forward_kl(inputs).detach()
        return LossOutputs(loss_T=outputs.loss_T, metrics_T=metrics_T)


def _forward_kl(inputs: LossInputs) -> Tensor:
    """Computes [T] the KL from teacher to student over the teacher's K most probable tokens and the set of all others.

    It is a lower bound of the whole KL, and equal to it if K is the vocabulary. It does not depend on the sampled
    token, so it needs no importance ratio for stale samples. Raises ValueError if the log-probs are missing.
    """
    teacher_TK, policy_TK = inputs.teacher_top_TK, inputs.policy_top_TK
    if teacher_TK is None or policy_TK is None:
        raise ValueError("signal top_k learns from the teacher's most probable tokens, and the samples have none")
    kl_T: Tensor = (teacher_TK.exp() * (teacher_TK - policy_TK)).sum(-1)
    rest_T, policy_rest_T = ((1 - logprobs_TK.exp().sum(-1)).clamp(min=TINY) for logprobs_TK in (teacher_TK, policy_TK))
    return kl_T + rest_T * (rest_T.log() - policy_rest_T.log())
