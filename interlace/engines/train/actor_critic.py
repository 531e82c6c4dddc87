"""Engine of soft actor-critic: a policy with a squashed Gaussian head, an ensemble of critics, and a temperature.

The policy is the transformers model that the rollout engines serve, so its publication and
checkpoints are as usual. The critics are small networks on the state and the action chunk.
Shapes: B = transitions, F = numbers of a state, C = numbers of a chunk, N = critics, P = tokens of a context.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import stable_hash
from interlace.core.state_parts import OPTIMIZER
from interlace.engines.train.attention import PackedLayout
from interlace.engines.train.checkpoint import Files, host_copy
from interlace.engines.train.engine import TrainEngine
from interlace.models.action_head import SquashedHead, head_of
from interlace.models.inputs import STATE, input_embedding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.algorithms.sac import SAC, SACSettings
    from interlace.core.transitions import TransitionBatch
    from interlace.core.types import IntArray, Metrics
    from interlace.engines.train.config import OptimizerConfig, TrainConfig
    from interlace.engines.train.ranks import Ranks
    from interlace.models.residence import Move

STATE_FILE = "actor_critic.safetensors"
"""File of a checkpoint with the critics, their targets, the temperature and the moments of their optimizers."""


class Critics(nn.Module):
    """N independent networks of one shape, each with separate random weights."""

    def __init__(self, num_inputs: int, settings: SACSettings, *, seed: int) -> None:
        super().__init__()
        count, noise = settings.num_critics, torch.Generator().manual_seed(seed)
        widths = [num_inputs, *[settings.critic_width] * settings.critic_layers, 1]
        sizes = [*pairwise(widths)]

        def uniform(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*shape, generator=noise) - 1) / math.sqrt(fan_in))

        self.weights = nn.ParameterList([uniform(count, *size, fan_in=size[0]) for size in sizes])
        self.biases = nn.ParameterList([uniform(count, 1, size[1], fan_in=size[0]) for size in sizes])
        self._normalises = settings.layer_norm

    def forward(self, states_BF: Tensor, actions_BC: Tensor) -> Tensor:
        """Computes values [N, B]."""
        given = torch.cat([states_BF, actions_BC], 1)
        found = given.expand(self.weights[0].shape[0], *given.shape)
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            found = torch.baddbmm(bias, found, weight)
            if place + 1 < len(self.weights):
                if self._normalises:
                    found = nn.functional.layer_norm(found, found.shape[-1:])
                found = torch.relu(found)
        return found.squeeze(-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    """Packed row of B contexts, which share the instruction before the state's placeholders."""

    input_ids: Tensor
    """[1, S] tokens."""
    position_ids: Tensor
    """[1, S] place of each token in its context."""
    layout: PackedLayout
    inputs: Tensor
    """[B placeholders] places of the placeholders in the row."""
    answers: Tensor
    """[B C] places of the query tokens in the row."""

    @classmethod
    def of(cls, context_ids: IntArray, first: int, num_queries: int, count: int, device: torch.device) -> _Row:
        """Lays out `count` contexts. context_ids: [P] tokens, the queries last. first: place of the first placeholder.

        num_queries: C.
        """
        tail = len(context_ids) - first
        begins = first + tail * np.arange(count)[:, None]
        shared, own = np.arange(first), begins + np.arange(tail)
        ids = np.concatenate([context_ids[:first], np.tile(context_ids[first:], count)])
        positions = np.concatenate([shared, np.tile(first + np.arange(tail), count)])
        return cls(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device),
            position_ids=torch.from_numpy(positions)[None].to(device),
            layout=PackedLayout.of([np.concatenate([shared, each]) for each in own], device),
            inputs=torch.from_numpy(own[:, : tail - num_queries].reshape(-1)).to(device),
            answers=torch.from_numpy(own[:, tail - num_queries :].reshape(-1)).to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StateFile:
    """Copied tensors of a checkpoint."""

    tensors: Mapping[str, Tensor]

    def write(self, folder: Path) -> None:
        """Writes the file."""
        from safetensors.torch import save_file

        save_file(dict(self.tensors), folder / STATE_FILE)


class ActorCriticEngine(TrainEngine):
    """Trains a policy by soft actor-critic on transitions (arXiv 1812.05905, with the changes of SACSettings)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: SAC,
        optimizer: OptimizerConfig,
        config: TrainConfig,
        seed: int,
        device: str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        """optimizer: of the policy. seed: of the critics' weights, and of all noise.

        Raises UserError if the policy has another head, or no state.
        """
        super().__init__(model, loss=algorithm.loss, optimizer=optimizer, config=config, device=device, ranks=ranks)
        reads = input_embedding(model.config)
        if not isinstance(head_of(model), SquashedHead) or reads is None or set(reads.shapes) != {STATE}:
            raise UserError(
                "soft actor-critic trains a policy that reads a state vector alone and whose head is squashed. Set "
                "model.robot.head=squashed, model.robot.state_size, and model.robot.image_size=0."
            )
        if not (self.packed.is_packed and self._ranks.is_alone):
            raise UserError("soft actor-critic trains on one device, with packed attention. Place the actor on one.")
        settings = algorithm.settings
        self._algorithm, self.settings, self._seed = algorithm, settings, seed
        self._placeholder, self._queries = reads.placeholder, tuple(model.config.query_token_ids)
        size = reads.shapes[STATE][0] + len(self._queries)
        place = self.packed.device
        self.critics = Critics(size, settings, seed=stable_hash("critics", seed) % 2**63).to(place)
        self.targets = Critics(size, settings, seed=0).to(place).requires_grad_(False)
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_temperature = nn.Parameter(torch.tensor(math.log(settings.initial_temperature), device=place))
        adam = torch.optim.Adam
        self._critic_adam = adam(self.critics.parameters(), lr=settings.critic_lr, fused=True)
        self._temperature_adam = adam([self.log_temperature], lr=settings.temperature_lr)
        target = settings.target_entropy
        self._target_entropy = -float(len(self._queries)) if target is None else target
        self.num_learned = 0
        """Updates of the critics so far, the key of their noise."""
        self._rows: dict[tuple[bytes, int], _Row] = {}
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)

    @property
    def temperature(self) -> float:
        """Returns the weight of the entropy."""
        return float(self.log_temperature.detach().exp())

    def learn(self, context_ids: IntArray, batch: TransitionBatch) -> None:
        """Makes one update of the critics, and of policy and temperature if they are due.

        context_ids: [P] tokens before the answer, equal for all transitions.
        """
        number = stable_hash("soft actor-critic", self._seed, self.num_learned)
        noise, draw = torch.Generator().manual_seed(number), np.random.default_rng(number)
        device, size = self.packed.device, (2, len(batch), len(self._queries))
        noises = torch.randn(size, generator=noise).to(device)
        states, actions, rewards, following, discounts = (
            torch.from_numpy(each).to(device)
            for each in (batch.states, batch.actions, batch.rewards, batch.next_states, batch.discounts)
        )
        row, temperature = self._row(context_ids, len(batch)), self.log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, next_logprobs = self.act(row, following, noises[0])
            values = self._smallest(self.targets(following, next_actions), draw)
            counted = temperature if self.settings.entropy_in_target else 0.0
            targets = self._algorithm.td_targets(rewards, discounts, values, next_logprobs, counted)
        found = self.critics(states, actions)
        loss = self._algorithm.critic_loss(found, targets)
        loss.backward()
        self._critic_adam.step()
        self._critic_adam.zero_grad(set_to_none=True)
        self.num_learned += 1
        self._note(critic_loss=loss, value=found.mean(), target=targets.mean())
        if self.num_learned % self.settings.policy_every == 0:
            self._improve(row, states, noises[1])
        moved: list[Tensor] = [*self.targets.parameters()]
        own: list[Tensor] = [*self.critics.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(moved, own, self.settings.tau)

    def act(self, row: _Row, states_BF: Tensor, noise_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Draws chunks of the policy. Returns actions [B, C] and log-probs [B], with gradient."""
        hidden = self.model.base_model(
            row.input_ids,
            position_ids=row.position_ids,
            packed_layout=row.layout,
            inputs={STATE: states_BF},
            input_places=row.inputs,
            use_cache=False,
        )[0]
        outputs = self.model.get_output_embeddings()(hidden[0].index_select(0, row.answers))
        actions, logprobs = SquashedHead.sample(outputs.unflatten(0, noise_BC.shape), noise_BC)
        return actions, logprobs.sum(1)

    def learned_metrics(self) -> Metrics:
        """Returns means over the updates since the last call. Raises InterlaceError if one is not finite."""
        means = {name: float(torch.stack(each).mean()) for name, each in self._sums.items()}
        self._sums.clear()
        if broken := [name for name, value in means.items() if not math.isfinite(value)]:
            raise InterlaceError(
                f"soft actor-critic diverged: {broken[0]} is {means[broken[0]]} after {self.num_learned} updates. "
                "Lower algorithm.critic_lr or optimizer.lr, or scale the rewards down (episode.reward_scale)."
            )
        return {f"sac/{name}": value for name, value in means.items()} | {"sac/temperature": self.temperature}

    def load_optimizer(self, folder: Path) -> None:
        """Restores the policy's optimizer, the critics, the temperature and their optimizers."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        super().load_optimizer(folder)
        try:
            saved = load_file(folder / STATE_FILE, device=str(self.packed.device))
            self.num_learned = int(saved.pop("num_learned"))
            for name, tensor in self._tensors().items():
                tensor.copy_(saved[name])
            self._load_moments(saved)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            what = f"{folder} has no readable critics ({type(error).__name__}: {error})"
            raise UserError(f"{what}. Delete {folder} to resume from the checkpoint before.") from None

    def _improve(self, row: _Row, states: Tensor, noise: Tensor) -> None:
        """Updates the policy and the temperature."""
        self.critics.requires_grad_(False)
        actions, logprobs = self.act(row, states, noise)
        found = self.critics(states, actions)
        values = found.mean(0) if len(found) > 2 else found.min(0).values  # the mean as in REDQ
        loss = self._algorithm.policy_loss(values, logprobs, self.log_temperature.detach().exp())
        loss.backward()
        self.critics.requires_grad_(True)
        norm = float(self.optimizer.grad_norm(1.0))
        self.optimizer.step(1.0, norm)
        self.optimizer.zero_grad()
        self._note(policy_loss=loss, entropy=-logprobs.mean(), grad_norm=torch.tensor(norm))
        if self.settings.temperature_lr:
            self._algorithm.temperature_loss(self.log_temperature, logprobs, self._target_entropy).backward()
            self._temperature_adam.step()
            self._temperature_adam.zero_grad(set_to_none=True)

    def _smallest(self, values_NB: Tensor, draw: np.random.Generator) -> Tensor:
        """Returns the minimum [B] of the critics that form the target."""
        count, wanted = self.settings.num_critics, self.settings.target_critics
        if wanted < count:
            values_NB = values_NB[torch.from_numpy(np.sort(draw.permutation(count)[:wanted])).to(values_NB.device)]
        return values_NB.min(0).values

    def _row(self, context_ids: IntArray, count: int) -> _Row:
        key = (context_ids.tobytes(), count)
        if key not in self._rows:
            places = np.flatnonzero(context_ids == self._placeholder)
            if not len(places):
                raise UserError("the context of an episode has no placeholder of a state, so the policy sees nothing.")
            whole = np.concatenate([context_ids, np.asarray(self._queries, context_ids.dtype)])
            self._rows[key] = _Row.of(whole, int(places[0]), len(self._queries), count, self.packed.device)
        return self._rows[key]

    def _note(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name].append(value.detach())

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the live tensors besides the policy, without moments."""
        found = {f"critics.{name}": each for name, each in self.critics.state_dict().items()}
        found |= {f"targets.{name}": each for name, each in self.targets.state_dict().items()}
        return found | {"log_temperature": self.log_temperature.detach()}

    def _named_parameters(self) -> list[tuple[str, torch.optim.Optimizer, nn.Parameter]]:
        """Lists the trained parameters with their optimizers, by name."""
        found: list[tuple[str, torch.optim.Optimizer, nn.Parameter]] = [
            (f"critics.{name}", self._critic_adam, each) for name, each in self.critics.named_parameters()
        ]
        return [*found, ("log_temperature", self._temperature_adam, self.log_temperature)]

    def _load_moments(self, saved: Mapping[str, Tensor]) -> None:
        for name, optimizer, parameter in self._named_parameters():
            kinds = [key.partition(":")[0] for key in saved if key.endswith(f":{name}")]
            optimizer.state[parameter] = {kind: saved[f"{kind}:{name}"] for kind in kinds}

    def _copy_files(self, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[Files]:
        tensors = {name: host_copy(each) for name, each in self._tensors().items()}
        for name, optimizer, parameter in self._named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors |= {f"{kind}:{name}": host_copy(each) for kind, each in state.items()}
        tensors["num_learned"] = torch.tensor(self.num_learned)
        return (*super()._copy_files(tokenizer), _StateFile(tensors=tensors))

    def _movable(self) -> dict[str, Callable[[Move], None]]:
        """Returns the functions that move the parts; the critics move with the optimizer."""
        found = super()._movable()
        move_moments = found[OPTIMIZER]

        def move_all(move: Move) -> None:
            move_moments(move)
            self._move_critics(move)

        return {**found, OPTIMIZER: move_all}

    def _move_critics(self, move: Move) -> None:
        self.critics._apply(move)
        self.targets._apply(move)
        self.log_temperature.data = move(self.log_temperature.data)
        for optimizer in (self._critic_adam, self._temperature_adam):
            for state in optimizer.state.values():
                state.update({kind: move(each) for kind, each in state.items()})
