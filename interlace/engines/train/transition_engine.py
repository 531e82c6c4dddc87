"""Base of engines that train a policy on transitions of a replay, with critics beside it.

The policy is the transformers model that the rollout engines serve, so its publication and checkpoints are as usual.
The critics are small networks on the state and the action chunk.
Shapes: B = transitions, F = numbers of a state, C = numbers of a chunk, P = tokens of a context.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import stable_hash
from interlace.core.state_parts import OPTIMIZER
from interlace.engines.train.answer_rows import hidden_at, reads_answers_alone
from interlace.engines.train.attention import PackedLayout
from interlace.engines.train.checkpoint import Files, host_copy
from interlace.engines.train.engine import TrainEngine
from interlace.engines.train.one_layer import SharedContext, has_one_layer
from interlace.models.action_head import head_of
from interlace.models.inputs import STATE, input_embedding
from interlace.models.number_ids import numbers_to_ids

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.algorithms.replayed import ReplayedAlgorithm
    from interlace.core.transitions import TransitionBatch
    from interlace.core.types import FloatArray, IntArray, Metrics
    from interlace.engines.train.config import OptimizerConfig, TrainConfig
    from interlace.engines.train.ranks import Ranks
    from interlace.models.residence import Move

ModuleT = TypeVar("ModuleT", bound=nn.Module)

STATE_FILE = "actor_critic.safetensors"
"""File of a checkpoint with the critics, their targets and further parts, and the moments of their optimizers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextRow:
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
    shared: SharedContext | None = None
    """The same contexts for a policy of one layer; None for other policies."""

    @classmethod
    def of(cls, context_ids: IntArray, first: int, num_queries: int, count: int, device: torch.device) -> ContextRow:
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
class Learnt:
    """Transitions of one update, as tensors."""

    row: ContextRow
    states: Tensor
    """[B, F]"""
    actions: Tensor
    """[B, C] in float32."""
    rewards: Tensor
    """[B]"""
    next_states: Tensor
    """[B, F]"""
    discounts: Tensor
    """[B]"""
    weights: Tensor | None = None
    """[B] weights of the errors; None if all are 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    network: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None for networks that follow others."""
    parameters: list[Tensor]
    """Parameters of the network. A list, because a walk through the modules takes as long as a small operation."""
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)
    """Names of the trained parameters in a checkpoint."""


class _Parts(dict[str, _Part]):
    def tensors(self) -> dict[str, Tensor]:
        """Returns the live tensors of the networks, without moments."""
        return {
            f"{name}.{key}": each.detach()
            for name, part in self.items()
            for key, each in part.network.state_dict().items()
        }

    def moments(self) -> dict[str, Tensor]:
        """Returns the live moments of the optimizers."""
        return {
            f"{kind}:{name}": each
            for part in self.values()
            for parameter, name in part.names.items()
            for kind, each in (part.optimizer.state.get(parameter, {}) if part.optimizer else {}).items()
        }

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores tensors and moments of a checkpoint. Raises KeyError and RuntimeError if they do not fit."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        for part in self.values():
            for parameter, name in part.names.items():
                kinds = [key.partition(":")[0] for key in saved if key.endswith(f":{name}")]
                assert part.optimizer  # only trained parameters have names
                part.optimizer.state[parameter] = {kind: saved[f"{kind}:{name}"] for kind in kinds}

    def move(self, move: Move) -> None:
        for part in self.values():
            part.network._apply(move)
            for state in part.optimizer.state.values() if part.optimizer else ():
                state.update({kind: move(each) for kind, each in state.items()})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StateFile:
    """Copied tensors of a checkpoint."""

    tensors: Mapping[str, Tensor]

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(self.tensors), folder / STATE_FILE)


class TransitionEngine(TrainEngine):
    """Trains a policy by an algorithm on transitions. A subclass builds its networks and defines an update."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: ReplayedAlgorithm,
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
        reads, head = input_embedding(model.config), head_of(model)
        named = getattr(model.config, "action_head", None)
        if head is None or named not in algorithm.heads or reads is None or set(reads.shapes) != {STATE}:
            raise UserError(
                f"algorithm {type(algorithm).__name__} trains a policy that reads a state vector alone and whose head "
                f"is {' or '.join(algorithm.heads)}. Set model.robot.head={algorithm.heads[0]}, "
                "model.robot.state_size, and model.robot.image_size=0."
            )
        if not (self.packed.is_packed and self._ranks.is_alone):
            raise UserError("off-policy learning trains on one device, with packed attention. Place the actor on one.")
        self._algorithm, self.settings = algorithm, algorithm.settings
        self._reads_answers_alone = reads_answers_alone(model)
        self._head, self._seed, self._output_layer = head, seed, model.get_output_embeddings()
        self._placeholder, self._queries = reads.placeholder, tuple(model.config.query_token_ids)
        self._parts = _Parts()
        self.num_learned = 0
        """Updates of the critics so far, the key of their noise."""
        self._rows: dict[tuple[bytes, int], ContextRow] = {}
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._build(reads.shapes[STATE][0], len(self._queries))

    @abstractmethod
    def _build(self, state_size: int, num_actions: int) -> None:
        """Makes the networks besides the policy. num_actions: C."""

    @abstractmethod
    def _update(self, learnt: Learnt) -> None:
        """Makes one update of all parts that are due."""

    def learn(self, context_ids: IntArray, batch: TransitionBatch, weights_B: FloatArray | None = None) -> None:
        """Makes one update.

        context_ids: [P] tokens before the answer, equal for all transitions. weights_B: weights of the transitions'
        errors for drawing by priority; None if all are 1.
        """
        device = self.packed.device
        states, actions, rewards, following, discounts = (
            torch.from_numpy(each).to(device)
            for each in (batch.states, batch.actions, batch.rewards, batch.next_states, batch.discounts)
        )
        self._update(
            Learnt(
                row=self._row(context_ids, len(batch)),
                states=states,
                actions=actions,
                rewards=rewards,
                next_states=following,
                discounts=discounts,
                weights=None if weights_B is None else torch.from_numpy(weights_B).to(device),
            )
        )
        self.num_learned += 1

    def last_errors(self) -> FloatArray:
        """Returns the mean distance [B] of the critics from the target in the last update.

        Raises ValueError if the algorithm has no priorities.
        """
        raise ValueError(f"{type(self).__name__} computes no priorities")

    def outputs(self, row: ContextRow, states_BF: Tensor) -> Tensor:
        """Computes the policy's outputs [B C, V] for the numbers of chunks, with gradient."""
        body: Any = self.model.base_model
        inputs = {STATE: states_BF}
        if row.shared is not None:
            hidden = row.shared.hidden(body, body.embed_inputs(inputs))
        elif self._reads_answers_alone:
            embeddings = body.embed_rows(row.input_ids, inputs, row.inputs)
            hidden = hidden_at(body, embeddings, row.position_ids, row.layout, row.answers)
        else:
            whole = body(
                row.input_ids,
                position_ids=row.position_ids,
                packed_layout=row.layout,
                inputs=inputs,
                input_places=row.inputs,
                use_cache=False,
            )[0]
            hidden = whole[0].index_select(0, row.answers)
        found: Tensor = self._output_layer(hidden)
        return found

    def read_recorded_logprobs(self, learnt: Learnt) -> Tensor:
        """Computes the log-probs [B] of the recorded actions under the policy, with gradient."""
        ids = torch.from_numpy(numbers_to_ids(learnt.actions.cpu().numpy())).to(self.packed.device)
        logprobs, _ = self._head.logprobs(self.outputs(learnt.row, learnt.states), ids.flatten(), 1.0)
        return logprobs.view(learnt.actions.shape).sum(1)

    def collect_learned_metrics(self) -> Metrics:
        """Returns means over the updates since the last call. Raises InterlaceError if one is not finite."""
        means = {name: float(torch.stack(each).mean()) for name, each in self._sums.items()}
        self._sums.clear()
        if broken := [name for name, value in means.items() if not math.isfinite(value)]:
            raise InterlaceError(
                f"off-policy learning diverged: {broken[0]} is {means[broken[0]]} after {self.num_learned} updates. "
                "Lower algorithm.critic_lr or optimizer.lr, or scale the rewards down (episode.reward_scale)."
            )
        return {f"off_policy/{name}": value for name, value in means.items()}

    def load_optimizer(self, folder: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        super().load_optimizer(folder)
        try:
            saved = load_file(folder / STATE_FILE, device=str(self.packed.device))
            self.num_learned = int(saved.pop("num_learned"))
            self._parts.load(saved)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            what = f"{folder} has no readable critics ({type(error).__name__}: {error})"
            raise UserError(f"{what}. Delete {folder} to resume from the checkpoint before.") from None

    def _add_trained(
        self, name: str, network: ModuleT, lr: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> ModuleT:
        """Adds a network that Adam trains."""
        network = network.to(self.packed.device)
        adam = torch.optim.Adam(network.parameters(), lr=lr, betas=betas, fused=True)
        names = {each: f"{name}.{key}" for key, each in network.named_parameters()}
        self._parts[name] = _Part(network=network, optimizer=adam, parameters=[*names], names=names)
        return network

    def _add_follower(self, name: str, network: ModuleT, followed: ModuleT) -> ModuleT:
        """Adds a network that starts as a copy of another."""
        network = network.to(self.packed.device).requires_grad_(False)
        network.load_state_dict(followed.state_dict())
        self._parts[name] = _Part(network=network, optimizer=None, parameters=[*network.parameters()])
        return network

    def _key(self, name: str) -> int:
        return stable_hash(name, self._seed) % 2**63

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer = self._parts[name].optimizer
        assert optimizer
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _follow(self, follower: str, followed: str, share: float) -> None:
        """Moves the parameters of a network towards another's by a share of their difference."""
        torch._foreach_lerp_(self._parts[follower].parameters, self._parts[followed].parameters, share)

    def _require_grad(self, name: str, required: bool) -> None:
        """Sets whether a network's parameters get gradients."""
        for each in self._parts[name].parameters:
            each.requires_grad_(required)

    def _step_policy(self, loss: Tensor) -> None:
        loss.backward()
        norm = float(self.optimizer.grad_norm(1.0))
        self.optimizer.step(1.0, norm)
        self.optimizer.zero_grad()
        self._note(policy_loss=loss, grad_norm=torch.tensor(norm))

    def _row(self, context_ids: IntArray, count: int) -> ContextRow:
        key = (context_ids.tobytes(), count)
        if key not in self._rows:
            places = np.flatnonzero(context_ids == self._placeholder)
            if not len(places):
                raise UserError("the context of an episode has no placeholder of a state, so the policy sees nothing.")
            if len(context_ids) - places[0] != len(places):
                raise UserError(
                    f"the context of an episode has placeholders of a state at tokens {places.tolist()} of "
                    f"{len(context_ids)}, and only the last tokens may be placeholders. Remove the placeholder's text "
                    "from the instructions."
                )
            whole = np.concatenate([context_ids, np.asarray(self._queries, context_ids.dtype)])
            row = ContextRow.of(whole, int(places[0]), len(self._queries), count, self.packed.device)
            self._rows[key] = replace(row, shared=_share_context(self.model, row, len(places), len(self._queries)))
        return self._rows[key]

    def _note(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name].append(value.detach())

    def _copy_files(self, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[Files]:
        tensors = {name: host_copy(each) for name, each in (self._parts.tensors() | self._parts.moments()).items()}
        tensors["num_learned"] = torch.tensor(self.num_learned)
        return (*super()._copy_files(tokenizer), _StateFile(tensors=tensors))

    def _movable(self) -> dict[str, Callable[[Move], None]]:
        """Returns the functions that move the parts; the critics move with the optimizer."""
        found = super()._movable()
        move_moments = found[OPTIMIZER]

        def move_all(move: Move) -> None:
            move_moments(move)
            self._parts.move(move)

        return {**found, OPTIMIZER: move_all}


def _share_context(model: PreTrainedModel, row: ContextRow, num_states: int, num_queries: int) -> SharedContext | None:
    """Returns the tokens of a row's contexts for a policy of one layer; None for other policies."""
    if not has_one_layer(model):
        return None
    first, ids = int(row.inputs[0]), row.input_ids[0]
    after = first + num_states
    shared = torch.cat([ids[:first], ids[after : after + num_queries]])
    return SharedContext.of(model.base_model, shared, num_states, num_queries)
