"""REINFORCE++ (arXiv 2501.03262): returns to go, whitened over the whole batch; no critic and no group."""

from pydantic import Field

from interlace.algorithms.advantages import at_trained_tokens, sum_discounted, token_rewards
from interlace.algorithms.base import Advantages
from interlace.algorithms.policy import PolicyAlgorithm, PolicySettings
from interlace.core.types import FloatArray, Sample, SampleGroup


class ReinforcePPSettings(PolicySettings):
    """Settings of REINFORCE++, which subtracts the KL to the reference from the reward."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the return to go."""


class ReinforcePP(PolicyAlgorithm):
    """REINFORCE++: a token's advantage is its return to go, whitened over the batch."""

    Settings = ReinforcePPSettings
    settings: ReinforcePPSettings
    whitens_batch = True

    def advantages(self, group: SampleGroup) -> Advantages:
        returns = [self._return_to_go(sample) for sample in group.samples]
        return Advantages(advantages=returns)

    def _return_to_go(self, sample: Sample) -> FloatArray:
        rewards = token_rewards(sample, self.settings.kl_reward_coefficient)
        return at_trained_tokens(sum_discounted(rewards, self.settings.gamma), sample)
