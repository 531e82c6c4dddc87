"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300), token-level loss (arXiv 2503.14476) by default."""

from interlace.algorithms.advantages import group_normalized, per_token
from interlace.algorithms.base import Advantages
from interlace.algorithms.policy import GroupAlgorithm
from interlace.core.types import SampleGroup


class GRPO(GroupAlgorithm):
    """The advantage is the reward's distance from the group's mean, in standard deviations."""

    def advantages(self, group: SampleGroup) -> Advantages:
        advantages_G = group_normalized(self.rewards(group), scale_by_std=True)
        return Advantages(advantages=per_token(advantages_G, group.samples))
