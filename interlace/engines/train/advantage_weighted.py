"""Engines of policies that imitate recorded actions by their advantage: IQL and AWR.

Shapes: B = transitions, N = critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.engines.train.ensemble import Ensemble
from interlace.engines.train.transition_engine import Learnt, TransitionEngine

if TYPE_CHECKING:
    from interlace.algorithms.awr import AWR, AWRSettings
    from interlace.algorithms.iql import IQL, IQLSettings


class ImplicitQEngine(TransitionEngine):
    """Trains by implicit Q-learning (arXiv 2110.06169): value, then policy, then critics."""

    _algorithm: IQL
    settings: IQLSettings

    def _build(self, state_size: int, num_actions: int) -> None:
        settings, size = self.settings, state_size + num_actions
        critics = Ensemble(size, settings, seed=self._key("critics"), count=settings.num_critics)
        self.critics = self._add_trained("critics", critics, settings.critic_lr)
        copy = Ensemble(size, settings, seed=0, count=settings.num_critics)
        self.targets = self._add_follower("targets", copy, self.critics)
        value = Ensemble(state_size, settings, seed=self._key("value"))
        self.value = self._add_trained("value", value, settings.critic_lr)

    def _update(self, learnt: Learnt) -> None:
        with torch.no_grad():
            smallest = self.targets(learnt.states, learnt.actions).min(0).values
        value_loss = self._algorithm.value_loss(smallest - self.value(learnt.states)[0])
        self._step("value", value_loss)
        with torch.no_grad():
            weights = self._algorithm.weights(smallest - self.value(learnt.states)[0])
            targets = learnt.rewards + learnt.discounts * self.value(learnt.next_states)[0]
        self._step_policy(self._algorithm.imitation_loss(self.read_recorded_logprobs(learnt), weights))
        found = self.critics(learnt.states, learnt.actions)
        critic_loss = self._algorithm.critic_loss(found, targets)
        self._step("critics", critic_loss)
        self._follow("targets", "critics", self.settings.tau)
        self._note(
            value_loss=value_loss,
            critic_loss=critic_loss,
            value=found.mean(),
            target=targets.mean(),
            weight=weights.mean(),
        )


class AdvantageWeightedEngine(TransitionEngine):
    """Trains by advantage-weighted regression (arXiv 1910.00177): value, then policy."""

    _algorithm: AWR
    settings: AWRSettings

    def _build(self, state_size: int, num_actions: int) -> None:
        del num_actions
        value = Ensemble(state_size, self.settings, seed=self._key("value"))
        self.value = self._add_trained("value", value, self.settings.critic_lr)

    def _update(self, learnt: Learnt) -> None:
        with torch.no_grad():
            returns = learnt.rewards + learnt.discounts * self.value(learnt.next_states)[0]
        found = self.value(learnt.states)
        weights = self._algorithm.weights(returns - found[0].detach())
        loss = self._algorithm.critic_loss(found, returns)
        self._step("value", loss)
        self._step_policy(self._algorithm.imitation_loss(self.read_recorded_logprobs(learnt), weights))
        self._note(critic_loss=loss, value=found.mean(), target=returns.mean(), weight=weights.mean())
