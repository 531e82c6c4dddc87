"""PPO (arXiv 1707.06347) with generalized advantage estimation (arXiv 1506.02438) and a critic."""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from interlace.algorithms.advantages import (
    at_trained_tokens,
    generalized,
    kl_penalty,
    list_trained_turns,
    select_trained,
    token_rewards,
    turn_discounts,
    turn_rewards,
    value_after,
)
from interlace.algorithms.base import Advantages, Needs
from interlace.algorithms.policy import PolicyAlgorithm, PolicySettings
from interlace.core.types import FloatArray, Sample, SampleGroup


class PPOSettings(PolicySettings):
    """Settings of PPO. gamma = lam = 1 is the usual choice if only the end of a response is rewarded."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards, from token to token."""
    turn_gamma: float = Field(default=1.0, gt=0, le=1)
    """Further discount from each turn of an episode to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE: 0 uses the critic's next value, 1 the observed return."""
    advantage_of: Literal["token", "turn"] = "token"
    """Unit that counts as one action. `turn`: a turn of an episode (a robot's chunk) has one value, the value before
    its first token, and one advantage, shared by all its tokens."""
    whiten: bool = True
    """Scale the batch's advantages to mean 0 and standard deviation 1; training then waits for the whole batch."""


class PPO(PolicyAlgorithm):
    """PPO over trained tokens: tool and user tokens of an episode are skipped, as if they took no time."""

    Settings = PPOSettings
    settings: PPOSettings

    @property
    def whitens_batch(self) -> bool:
        return self.settings.whiten

    @property
    def needs(self) -> Needs:
        return replace(super().needs, critic=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        pairs = [self._estimate(sample) for sample in group.samples]
        return Advantages(advantages=[pair[0] for pair in pairs], returns=[pair[1] for pair in pairs])

    def _estimate(self, sample: Sample) -> tuple[FloatArray, FloatArray]:
        """Returns (advantages, returns), [L] each; the return is the critic's target: advantage + value."""
        if sample.values is None:
            raise ValueError(f"sample {sample.key} has no values: PPO needs a critic")
        if self.settings.advantage_of == "turn":
            return self._estimate_turns(sample, select_trained(sample.values, sample))
        values = select_trained(sample.values, sample)
        rewards = token_rewards(sample, self.settings.kl_reward_coefficient)
        gamma = turn_discounts(sample, self.settings.gamma, self.settings.turn_gamma)
        after = value_after(sample, self.settings.turn_gamma)
        advantages = self._estimate_advantages(rewards, values, gamma, after)
        return at_trained_tokens(advantages, sample), at_trained_tokens(advantages + values, sample)

    def _estimate_turns(self, sample: Sample, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns (advantages, returns), [L] each, for an episode whose actions are its turns."""
        turns = list_trained_turns(sample)
        penalties = select_trained(kl_penalty(sample, self.settings.kl_reward_coefficient), sample)
        rewards = turn_rewards(sample, turns)
        rewards -= np.array([penalties[turn.begin : turn.end].sum() for turn in turns], np.float32)
        first = values[[turn.begin for turn in turns]]
        gamma = self.settings.gamma * self.settings.turn_gamma
        advantages = self._estimate_advantages(rewards, first, gamma, value_after(sample, gamma))
        sizes = [turn.end - turn.begin for turn in turns]
        spread = [at_trained_tokens(np.repeat(each, sizes), sample) for each in (advantages, advantages + first)]
        return spread[0], spread[1]

    def _estimate_advantages(
        self, rewards: FloatArray, values: FloatArray, gamma: float | FloatArray, after: float
    ) -> FloatArray:
        """after: value after the last turn."""
        return generalized(rewards, values, gamma=gamma, lam=self.settings.lam, value_after=after)
