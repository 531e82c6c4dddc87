"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300), token-level loss (arXiv 2503.14476) by default."""

from typing import ClassVar

from interlace.algorithms.advantages import group_normalized, per_token
from interlace.algorithms.base import Advantages
from interlace.algorithms.policy import GroupAlgorithm
from interlace.core.types import SampleGroup


class GRPO(GroupAlgorithm):
    """The advantage is the reward's distance from the group's mean, in standard deviations."""

    scale_by_std: ClassVar[bool] = True
    """Flag: the distance is divided by the standard deviation of the group."""

    def advantages(self, group: SampleGroup) -> Advantages:
        advantages_G = group_normalized(self.rewards(group), scale_by_std=self.scale_by_std)
        return Advantages(advantages=per_token(advantages_G, group.samples))
