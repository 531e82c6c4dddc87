"""RLOO: REINFORCE with a leave-one-out baseline, the whole response as one action (arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.algorithms.advantages import leave_one_out, per_token
from interlace.algorithms.base import Advantages
from interlace.algorithms.losses import sequence_sum
from interlace.algorithms.policy import GroupAlgorithm, OwnRatioSettings
from interlace.core.training import MAX_LOG_RATIO, Aggregation, LossInputs

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.types import SampleGroup


class RLOOSettings(OwnRatioSettings):
    """Settings of GRPO. Each token carries its sequence's loss, so the mean over tokens and sequences is their mean."""

    aggregation: Aggregation = "seq_mean_token_mean"


class RLOO(GroupAlgorithm):
    """The advantage is the reward minus the mean of the other samples'; the ratio is the whole sequence's."""

    Settings = RLOOSettings

    def advantages(self, group: SampleGroup) -> Advantages:
        return Advantages(advantages=per_token(leave_one_out(self.rewards(group)), group.samples))

    def ratio(self, inputs: LossInputs, proximal_T: Tensor) -> Tensor:
        """Computes the ratio of the sequence as a single action, by the sum of its log-probs, [T]."""
        log_ratio_N = sequence_sum(inputs.logprobs_T - proximal_T, inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return log_ratio_N.exp()[inputs.sample_T]
