"""DAPO (arXiv 2503.14476): GRPO with clip-higher, token-level loss and dynamic sampling.

The paper's fourth part, the soft overlong penalty, is part of the reward: `reward.shaping.overlong_limit` and
`overlong_buffer`.
"""

from pydantic import NonNegativeFloat

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.policy import GroupSettings


class DAPOSettings(GroupSettings):
    """Defaults of the paper, section 4.1."""

    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    drop_zero_variance: bool = True


class DAPO(GRPO):
    """GRPO with other settings."""

    Settings = DAPOSettings
