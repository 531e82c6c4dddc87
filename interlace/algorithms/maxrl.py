"""MaxRL (Maximum Likelihood Reinforcement Learning, 2026): group advantages scaled by the mean reward, not the std."""

from typing import Self

from pydantic import model_validator

from interlace.algorithms.advantages import mean_scaled, per_token
from interlace.algorithms.base import Advantages
from interlace.algorithms.policy import GroupAlgorithm, GroupSettings
from interlace.core.errors import UserError
from interlace.core.types import SampleGroup


class MaxRLSettings(GroupSettings):
    """Settings of MaxRL, the same as GRPO's."""

    @model_validator(mode="after")
    def _refuse_kl_in_rewards(self) -> Self:
        if self.kl_reward_coefficient:
            raise ValueError(
                f"kl_reward_coefficient = {self.kl_reward_coefficient:g} would make rewards negative, and maxrl "
                "divides by their mean; put the KL into the loss instead, with kl_coefficient"
            )
        return self


class MaxRL(GroupAlgorithm):
    """(reward - mean) / mean: the rarer the successes of a prompt, the larger their advantage. Needs rewards >= 0."""

    Settings = MaxRLSettings

    @property
    def min_reward(self) -> float:
        """Returns 0: with rewards below 0 the mean may be negative, and the division would reverse the signs."""
        return 0.0

    def advantages(self, group: SampleGroup) -> Advantages:
        rewards_G = self.rewards(group)
        if (rewards_G < self.min_reward).any():
            raise UserError(
                f"maxrl divides by the mean reward of a group and got {rewards_G.min():g}: "
                "score with rewards of 0 or more (such as 1 for right, 0 for wrong), or use grpo."
            )
        return Advantages(advantages=per_token(mean_scaled(rewards_G), group.samples))
