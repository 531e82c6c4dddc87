"""REINFORCE++ with a group baseline (arXiv 2501.03262): rewards less their group's mean, whitened over the batch."""

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.losses import KLEstimator
from interlace.algorithms.policy import GroupSettings


class ReinforcePPBaselineSettings(GroupSettings):
    """Settings of GRPO; a KL in the loss uses the estimator with the unbiased gradient."""

    kl_estimator: KLEstimator = "k2"


class ReinforcePPBaseline(GRPO):
    """GRPO with the standard deviation of the batch instead of each group's."""

    Settings = ReinforcePPBaselineSettings
    scale_by_std = False
    whitens_batch = True
