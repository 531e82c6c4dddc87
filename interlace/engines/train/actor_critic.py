"""Engine of soft actor-critic: a policy with a squashed Gaussian head, an ensemble of critics, and a temperature.

Shapes: B = transitions, C = numbers of a chunk, N = critics.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from interlace.core.random import stable_hash
from interlace.engines.train.ensemble import Ensemble
from interlace.engines.train.transition_engine import ContextRow, Learnt, TransitionEngine
from interlace.models.action_head import SquashedHead

if TYPE_CHECKING:
    from interlace.algorithms.sac import SAC, SACSettings
    from interlace.core.types import FloatArray, Metrics


class ActorCriticEngine(TransitionEngine):
    """Trains a policy by soft actor-critic on transitions (arXiv 1812.05905, with the changes of SACSettings)."""

    _algorithm: SAC
    settings: SACSettings
    _errors: Tensor

    @property
    def temperature(self) -> float:
        """Returns the weight of the entropy."""
        return float(self.log_temperature.detach().exp())

    @property
    def log_temperature(self) -> nn.Parameter:
        """Returns the logarithm of the weight of the entropy, a single number."""
        return self._temperature["value"]

    def act(self, row: ContextRow, states_BF: Tensor, noise_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Draws chunks of the policy. Returns actions [B, C] and log-probs [B], with gradient."""
        outputs = self.outputs(row, states_BF)
        actions, logprobs = SquashedHead.sample(outputs.unflatten(0, noise_BC.shape), noise_BC)
        return actions, logprobs.sum(1)

    def collect_learned_metrics(self) -> Metrics:
        return super().collect_learned_metrics() | {"off_policy/temperature": self.temperature}

    def last_errors(self) -> FloatArray:
        """Returns the mean distance [B] of the critics from the target in the last update."""
        errors: FloatArray = self._errors.cpu().numpy()
        return errors

    def _build(self, state_size: int, num_actions: int) -> None:
        settings, size = self.settings, state_size + num_actions
        count, batch_norm = settings.num_critics, settings.batch_norm
        critics = Ensemble(size, settings, seed=self._key("critics"), count=count, batch_norm=batch_norm)
        self.critics = self._add_trained("critics", critics, settings.critic_lr, settings.critic_betas)
        if settings.batch_norm:
            self.targets = self.critics  # they normalise current and next states together, and need no others
        else:
            self.targets = self._add_follower("targets", Ensemble(size, settings, seed=0, count=count), self.critics)
        self._temperature = nn.ParameterDict({"value": torch.tensor(math.log(settings.initial_temperature))})
        self._add_trained("temperature", self._temperature, settings.temperature_lr)
        target = settings.target_entropy
        self._target_entropy = -float(num_actions) if target is None else target

    def _update(self, learnt: Learnt) -> None:
        number = stable_hash("soft actor-critic", self._seed, self.num_learned)
        noise, draw = torch.Generator().manual_seed(number), np.random.default_rng(number)
        noises = torch.randn((2, *learnt.actions.shape), generator=noise).to(self.packed.device)
        targets, found = self._compute_values(learnt, noises[0], draw)
        self._errors = (found.detach() - targets).abs().mean(0)
        loss = self._algorithm.critic_loss(found, targets, learnt.weights)
        self._note(critic_loss=loss, value=found.mean(), target=targets.mean())
        self._step("critics", loss)
        if (self.num_learned + 1) % self.settings.policy_every == 0:
            self._update_policy(learnt, noises[1])
        if not self.settings.batch_norm:
            self._follow("targets", "critics", self.settings.tau)

    def _compute_values(self, learnt: Learnt, noise: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Computes the targets [B], without gradient, and the values of the recorded actions [N, B]."""
        with torch.no_grad():
            actions, logprobs = self.act(learnt.row, learnt.next_states, noise)
        if self.settings.batch_norm:
            states = torch.cat([learnt.states, learnt.next_states])
            both = self.critics(states, torch.cat([learnt.actions, actions]), fits_statistics=True)
            found, following = both.split(len(actions), 1)
            following = following.detach()
        else:
            found = self.critics(learnt.states, learnt.actions)
            with torch.no_grad():
                following = self.targets(learnt.next_states, actions)
        counted = self.log_temperature.detach().exp() if self.settings.entropy_in_target else 0.0
        smallest = self._find_smallest(following, draw)
        return self._algorithm.td_targets(learnt.rewards, learnt.discounts, smallest, logprobs, counted), found

    def _update_policy(self, learnt: Learnt, noise: Tensor) -> None:
        self._require_grad("critics", False)
        actions, logprobs = self.act(learnt.row, learnt.states, noise)
        found = self.critics(learnt.states, actions)
        values = found.mean(0) if len(found) > 2 else found.min(0).values  # the mean as in REDQ
        self._note(entropy=-logprobs.mean())
        self._step_policy(self._algorithm.policy_loss(values, logprobs, self.log_temperature.detach().exp()))
        self._require_grad("critics", True)
        if self.settings.temperature_lr:
            loss = self._algorithm.temperature_loss(self.log_temperature, logprobs, self._target_entropy)
            self._step("temperature", loss)

    def _find_smallest(self, values_NB: Tensor, draw: np.random.Generator) -> Tensor:
        """Returns the minimum [B] of the critics that form the target."""
        count, wanted = self.settings.num_critics, self.settings.target_critics
        if wanted < count:
            values_NB = values_NB[torch.from_numpy(np.sort(draw.permutation(count)[:wanted])).to(values_NB.device)]
        return values_NB.min(0).values
