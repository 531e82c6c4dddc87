"""PRIME: process rewards that nobody labelled (arXiv 2502.01456).

A second language model phi is trained to tell right responses from wrong ones by the sum of beta log(phi / reference);
each token's summand then is its process reward. The policy learns from those and from the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from interlace.algorithms.advantages import at_trained_tokens, implicit_process
from interlace.algorithms.base import Advantages, Needs
from interlace.algorithms.losses import sequence_sum
from interlace.algorithms.policy import GroupAlgorithm, GroupSettings
from interlace.core.training import LossInputs, LossOutputs

if TYPE_CHECKING:
    from interlace.core.types import FloatArray, Sample, SampleGroup


class PRIMESettings(GroupSettings):
    """Of the policy; beta also of the process reward model."""

    beta: float = Field(default=0.05, gt=0)
    """Scale of the implicit reward."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later process rewards."""
    success_reward: float = 0.5
    """A response with more reward than this counts as right when the process reward model is trained."""


class PRIME(GroupAlgorithm):
    """Leave-one-out advantages on process rewards and on outcomes."""

    Settings = PRIMESettings
    settings: PRIMESettings

    @property
    def needs(self) -> Needs:
        return replace(super().needs, process_reward=True, reference=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        process_G = [_trained_process_rewards(sample) for sample in group.samples]
        found = implicit_process(process_G, self.rewards(group), gamma=self.settings.gamma)
        spread = [at_trained_tokens(values, sample) for values, sample in zip(found, group.samples, strict=True)]
        return Advantages(advantages=spread)

    def process_rewards(self, sample: Sample, model_logprobs: FloatArray) -> FloatArray:
        """[L] beta x log(phi / reference). model_logprobs: [L] under the process reward model."""
        if sample.ref_logprobs is None:
            raise ValueError(f"sample {sample.key} has no reference log-probs")
        return np.float32(self.settings.beta) * (model_logprobs - sample.ref_logprobs)

    def process_model_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples as the process reward model trains on them: the advantages hold the outcome, 1 or 0."""
        return [
            replace(
                sample,
                advantages=np.full(sample.num_tokens, (sample.reward or 0) > self.settings.success_reward, np.float32),
                proximal_logprobs=None,
            )
            for sample in samples
        ]

    def process_model_loss(self, inputs: LossInputs) -> LossOutputs:
        """Binary cross-entropy of the outcome given sum of beta log(phi / reference) (eq. 5).

        A sequence's loss stands at each of its tokens: aggregate by seq_mean_token_mean.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        if inputs.ref_logprobs_T is None:
            raise ValueError("the process reward model is trained on samples with reference log-probs")
        score_N = self.settings.beta * sequence_sum(inputs.logprobs_T - inputs.ref_logprobs_T, inputs)
        score_T = score_N[inputs.sample_T]
        loss_T = binary_cross_entropy_with_logits(score_T, inputs.advantages_T, reduction="none")
        right_T = (score_T.detach() > 0) == (inputs.advantages_T > 0.5)
        return LossOutputs(loss_T=loss_T, metrics_T={"accuracy": right_T.float()})


def _trained_process_rewards(sample: Sample) -> FloatArray:
    if sample.process_rewards is None:
        raise ValueError(f"sample {sample.key} has no process rewards: PRIME needs a process reward model")
    return sample.process_rewards if sample.loss_mask is None else sample.process_rewards[sample.loss_mask]
