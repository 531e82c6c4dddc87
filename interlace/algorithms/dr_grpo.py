"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the std and by each response's length."""

from interlace.algorithms.advantages import group_normalized, per_token
from interlace.algorithms.base import Advantages
from interlace.algorithms.policy import GroupAlgorithm, GroupSettings
from interlace.core.training import Aggregation
from interlace.core.types import SampleGroup


class DrGRPOSettings(GroupSettings):
    """Settings of GRPO, with token losses summed over a constant length."""

    aggregation: Aggregation = "constant"


class DrGRPO(GroupAlgorithm):
    """The advantage is the reward's distance from the group's mean."""

    Settings = DrGRPOSettings

    def advantages(self, group: SampleGroup) -> Advantages:
        advantages_G = group_normalized(self.rewards(group), scale_by_std=False)
        return Advantages(advantages=per_token(advantages_G, group.samples))
