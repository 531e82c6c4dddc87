"""DAPO (arXiv 2503.14476): GRPO with clip-higher, token-level loss and dynamic sampling.

Its fourth part, the soft overlong penalty, belongs to the reward: `reward.shaping.overlong_limit`, `overlong_buffer`.
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
    """GRPO under other settings."""

    Settings = DAPOSettings
