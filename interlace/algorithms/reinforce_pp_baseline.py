"""REINFORCE++ with a group baseline (arXiv 2501.03262): rewards less their group's mean, whitened over the batch."""

from collections.abc import Sequence
from dataclasses import replace

from interlace.algorithms.advantages import group_normalized, per_token, whitened
from interlace.algorithms.base import Advantages, Needs, advantages_of
from interlace.algorithms.losses import KLEstimator
from interlace.algorithms.policy import GroupAlgorithm, GroupSettings
from interlace.core.types import FloatArray, Sample, SampleGroup


class ReinforcePPBaselineSettings(GroupSettings):
    """Settings of GRPO; a KL in the loss uses the estimator with the unbiased gradient."""

    kl_estimator: KLEstimator = "k2"


class ReinforcePPBaseline(GroupAlgorithm):
    """GRPO with the standard deviation of the batch instead of each group's."""

    Settings = ReinforcePPBaselineSettings

    @property
    def needs(self) -> Needs:
        return replace(super().needs, batch_statistics=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        advantages_G = group_normalized(self.rewards(group), scale_by_std=False)
        return Advantages(advantages=per_token(advantages_G, group.samples))

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        return whitened(advantages_of(samples), [sample.loss_mask for sample in samples])
