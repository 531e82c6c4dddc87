"""ReMax: REINFORCE with the greedy response's reward as the baseline (arXiv 2310.10505, algorithm 1)."""

from dataclasses import replace

from interlace.algorithms.advantages import per_token
from interlace.algorithms.base import Advantages, Needs
from interlace.algorithms.policy import PolicyAlgorithm
from interlace.core.types import SampleGroup


class ReMax(PolicyAlgorithm):
    """The advantage is the reward minus the reward of the greedy response to the same prompt."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, greedy_baseline=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        if group.baseline_reward is None:
            raise ValueError(f"group {group.gid} has no greedy baseline reward")
        return Advantages(advantages=per_token(self.rewards(group) - group.baseline_reward, group.samples))
