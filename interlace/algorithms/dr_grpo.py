"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the std and by each response's length."""

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.policy import GroupSettings
from interlace.core.training import Aggregation


class DrGRPOSettings(GroupSettings):
    """Settings of GRPO, with token losses summed over a constant length."""

    aggregation: Aggregation = "constant"


class DrGRPO(GRPO):
    """The advantage is the reward's distance from the group's mean."""

    Settings = DrGRPOSettings
    scale_by_std = False
