"""World model: a network, trained on trajectories, that predicts the result of a chunk of actions.

A small ensemble of networks predicts state vectors. From a state vector and a chunk of actions, each member predicts
the change of the state, the reward and whether the task is then solved. Disagreement between members indicates sparse
data, and limits the length of imagined episodes. `latent.py` predicts pictures. Both are of the class `WorldModel`.
Shapes: B = transitions, D = numbers of a model's state, C = numbers of a chunk (K actions of A numbers each).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import FINAL, FinishReason, FloatArray, IntArray, Sample, Segment
from interlace.models.config import EnsembleConfig
from interlace.models.inputs import STATE
from interlace.robots.world_model.imagination import ERRORS
from interlace.rollouts.envs.spec import Array, ArraySpec

WEIGHTS, CONFIG, STARTS = "world_model.safetensors", "world_model.json", "starts.npy"
"""Files of a saved model."""
MAX_STARTS = 512
"""Largest number of rows at which episodes are imagined, and from which errors are measured."""


class WorldModelConfig(Config):
    """Sizes that all world models have."""

    action_size: int = Field(ge=1)
    """Size of an action, A."""
    chunk: int = Field(ge=1)
    """Actions of a chunk, K."""
    low: tuple[float, ...] = ()
    """[A] smallest values of an action. If empty, each is -1."""
    high: tuple[float, ...] = ()
    """[A] largest values. If empty, each is 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transitions:
    """Executed chunks."""

    states: Array
    """[B, D] float32 state before the chunk, or [B, H, W, 3] uint8 picture."""
    chunks: FloatArray
    """[B, C] concatenated actions."""
    next_states: Array
    """State or picture after the chunk, in the shape of `states`; undefined if has_next is 0."""
    has_next: FloatArray
    """[B] 1 if the state after the chunk is known; 0 for the last turn of an episode without a final observation, and
    for a chunk that a limit cut."""
    rewards: FloatArray
    """[B] reward of the chunk."""
    successes: FloatArray
    """[B] 1 if the chunk solved the task, else 0."""
    ends: FloatArray
    """[B] 1 if the task ended with the chunk, by success or otherwise, else 0. The horizon ends no task."""
    firsts: FloatArray
    """[B] 1 at the first chunk of an episode, and at the first one after chunks of an expert; else 0. The chunks from
    one first chunk to the next are consecutive and in order."""

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """Prediction of the results of chunks."""

    next_states: FloatArray
    """[B, D] state of the model after the chunk."""
    rewards: FloatArray
    """[B] reward of the chunk."""
    successes: FloatArray
    """[B] probability that the task is then solved."""
    ends: FloatArray
    """[B] probability that the task then ends, by success or otherwise. An ensemble predicts success alone."""
    disagreement: FloatArray | None = None
    """[B] standard deviation of the state between the members of an ensemble, in units of the data's spread, averaged
    over D; None of a single network."""


def transitions_of(
    samples: Iterable[Sample],
    decode: Callable[[IntArray], FloatArray],
    solved: Callable[[Sample], bool] = lambda sample: (sample.reward or 0.0) > 0,
    array: str = STATE,
) -> Transitions:
    """Converts a robot's samples, such as a replay buffer's, to transitions.

    decode: converts a turn's action tokens to actions, [K, A]. solved: returns whether a sample solved its task, which
    it did with its last chunk. array: name of the observed array, `state` or `image`. Turns in which an expert acted
    instead of the policy are left out. Raises UserError for samples whose turns have no such array.
    """
    rows: list[tuple[Array, FloatArray, Array, float, float, float, float, float]] = []
    for sample in samples:
        turns = [each for each in sample.segments if each.kind != FINAL and (each.inputs is None or _has_acted(each))]
        states = [_read_array(sample, turn, array) for turn in turns]
        # The final observation has no answer.
        states += [_read_array(sample, each, array) for each in sample.segments[-1:] if each.kind == FINAL]
        for place, turn in enumerate(turns):
            if not _has_acted(turn):
                continue
            is_first = place == 0 or not _has_acted(turns[place - 1])
            is_whole = turn.sampled is None or bool(turn.sampled.all())  # else a limit cut the chunk
            is_known, is_last = is_whole and place + 1 < len(states), place == len(turns) - 1
            following = states[place + 1] if is_known else states[place]
            chunk = decode(turn.token_ids).reshape(-1).astype(np.float32)
            has_ended = is_last and sample.finish_reason == FinishReason.STOP
            flags = float(is_last and solved(sample)), float(has_ended), float(is_first)
            rows.append((states[place], chunk, following, float(is_known), float(turn.reward or 0.0), *flags))
    names = ("states", "chunks", "next_states", "has_next", "rewards", "successes", "ends", "firsts")
    columns = [
        np.stack([np.asarray(each, np.float32 if np.isscalar(each) else None) for each in column])
        for column in zip(*rows, strict=True)
    ]
    empty = np.zeros((0, 0), np.float32)
    return Transitions(**dict(zip(names, columns or [empty] * len(names), strict=True)))


class WorldModel(nn.Module, ABC):
    """Prediction of the results of chunks from states of the model, D numbers each."""

    array: ClassVar[str]
    """Name of the observed array that the model learns from and predicts."""
    config: WorldModelConfig
    change_scale: Tensor
    """Typical change of an observation per chunk: one number, or [D]. Measured at the first fit."""
    is_fitted: Tensor
    """1 after the first fit, else 0."""

    @property
    @abstractmethod
    def observation_spec(self) -> dict[str, ArraySpec]: ...

    @abstractmethod
    def fit(self, data: Transitions, *, steps: int, seed: int = 0) -> float:
        """Makes optimizer steps. Returns the mean loss of the last tenth. Raises UserError without data."""

    @abstractmethod
    def predict(self, states: FloatArray, chunks: FloatArray) -> Prediction:
        """Predicts the results of chunks, [B, C], from states, [B, D]."""

    @abstractmethod
    def list_starts(self, data: Transitions) -> NDArray[np.int64]:
        """Returns rows at which episodes may be imagined, at most MAX_STARTS."""

    @abstractmethod
    def infer_states(self, data: Transitions, rows: NDArray[np.int64]) -> FloatArray:
        """Returns the states of the model at rows of real episodes, [rows, D]."""

    @abstractmethod
    def decode(self, states: FloatArray) -> Array:
        """Returns the observations in states, [B, ...], in the shape and type of a simulator's."""

    def save(self, folder: Path, starts: FloatArray, errors: Mapping[int, float] | None = None) -> None:
        """Writes the model, the initial states of imagined episodes, [starts, D], and the measured errors by number of
        chunks (see error_by_horizon).
        """
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / WEIGHTS)
        (folder / CONFIG).write_text(self.config.model_dump_json(indent=1), encoding="utf-8")
        (folder / ERRORS).write_text(json.dumps(dict(errors or {})), encoding="utf-8")
        np.save(folder / STARTS, np.asarray(starts, np.float32), allow_pickle=False)


def error_by_horizon(model: WorldModel, data: Transitions, horizons: Sequence[int]) -> dict[int, float]:
    """Returns the distance of imagined observations from the real ones of the same episodes, by number of chunks from
    the model's starts.

    The distance is a root mean square over starts and numbers of an observation, in units of the typical change per
    chunk. A horizon longer than all episodes is omitted.
    """
    begins, found = np.flatnonzero(data.firsts > 0), {}
    rows, scale = model.list_starts(data), model.change_scale.cpu().numpy()
    ends = np.append(begins, len(data))[np.searchsorted(begins, rows, side="right")]
    imagined = model.infer_states(data, rows)
    for step in range(max(horizons)):
        lasts = rows + step < ends
        rows, ends, imagined = rows[lasts], ends[lasts], imagined[lasts]
        lasts = data.has_next[rows + step] > 0
        rows, ends, imagined = rows[lasts], ends[lasts], imagined[lasts]
        if not len(rows):
            break
        imagined = model.predict(imagined, data.chunks[rows + step]).next_states
        if step + 1 in horizons:
            real = np.asarray(data.next_states[rows + step], np.float32)
            gap = (np.asarray(model.decode(imagined), np.float32) - real) / scale
            found[step + 1] = float(np.sqrt((gap**2).mean()))
    return found


def _has_acted(segment: Segment) -> bool:
    """Returns whether a segment is an answer of the policy that the simulator executed."""
    return segment.sampled is None or bool(segment.sampled.any())


def _read_array(sample: Sample, turn: Segment, name: str) -> Array:
    """Returns an array that a turn observed, without [1]: from its arrays, or from the arrays of its context."""
    context = sample.segments[turn.parent] if turn.parent is not None and turn.parent >= 0 else turn
    inputs = turn.inputs if turn.inputs is not None else context.inputs
    array = inputs.get(name) if isinstance(inputs, Mapping) else None
    if array is None:
        raise UserError(
            f"sample {sample.key} has a turn without a `{name}`: a world model of kind ensemble learns from state "
            "vectors, and one of kind latent from pictures. Set world_model.kind to the kind of the policy's inputs."
        )
    return np.asarray(array, np.float32).reshape(-1) if name == STATE else np.asarray(array)[0]


class EnsembleModelConfig(EnsembleConfig, WorldModelConfig):
    """Sizes of an ensemble."""

    state_size: int = Field(ge=1)
    """Size of a state vector, D."""


class EnsembleModel(WorldModel):
    """The ensemble. A state of the model is the state vector. The data of the first fit scales states and chunks."""

    array = STATE
    config: EnsembleModelConfig
    mean: Tensor
    """[D + C] mean of states and chunks."""
    scale: Tensor
    """[D + C] standard deviation of states and chunks."""

    def __init__(self, config: EnsembleModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        given, outputs = config.state_size + config.chunk * config.action_size, config.state_size + 2
        sizes = [(given, config.width), (config.width, config.width), (config.width, outputs)]
        noise = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(config.members, *size, generator=noise) / size[0] ** 0.5) for size in sizes]
        )
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(config.members, 1, size[1])) for size in sizes])
        self.register_buffer("mean", torch.zeros(given))
        self.register_buffer("scale", torch.ones(given))
        self.register_buffer("change_scale", torch.ones(config.state_size))
        self.register_buffer("is_fitted", torch.zeros(()))

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Spec of `state`."""
        return {self.array: ArraySpec(shape=(self.config.state_size,), dtype="float32")}

    def forward(self, given_BG: Tensor) -> Tensor:
        """Returns [M, B, D + 2]: scaled change of the state, reward, logit of success. given: states, then chunks."""
        x = ((given_BG - self.mean) / self.scale).expand(self.config.members, *given_BG.shape[-2:])
        for weight, bias in zip(self.weights, self.biases, strict=True):
            is_last = weight is self.weights[-1]
            x = torch.baddbmm(bias, x, weight)
            x = x if is_last else F.silu(x)
        return x

    def fit(  # house: the parameters of the interface, and two more
        self, data: Transitions, *, steps: int, seed: int = 0, batch_size: int = 256, lr: float = 1e-3
    ) -> float:
        """Trains all members, each on separate draws. Returns the mean loss of the last tenth of the steps."""
        if not len(data):
            raise UserError("a world model was given no transitions to learn from: collect episodes first")
        states = np.asarray(data.states, np.float32)
        given = torch.from_numpy(np.concatenate([states, data.chunks], axis=1))
        change = torch.from_numpy(np.asarray(data.next_states, np.float32) - states)
        rest = torch.from_numpy(np.stack([data.has_next, data.rewards, data.successes], axis=1))
        if not self.is_fitted:
            self._measure(given, change[rest[:, 0] > 0])
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=1e-4)
        noise, device = torch.Generator().manual_seed(seed), self.mean.device
        given, change, rest = given.to(device), change.to(device), rest.to(device)
        members, losses = self.config.members, []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / steps)
            draw = torch.randint(len(data), (members, batch_size), generator=noise).to(device)
            out = self(given[draw])
            has_next, reward, success = rest[draw].unbind(-1)
            error = ((out[..., :-2] - change[draw] / self.change_scale) ** 2).mean(-1)
            loss = (error * has_next).mean() + F.mse_loss(out[..., -2], reward)
            loss = loss + F.binary_cross_entropy_with_logits(out[..., -1], success)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return float(np.mean(losses[-max(1, steps // 10) :]))

    @torch.no_grad()
    def predict(self, states: FloatArray, chunks: FloatArray) -> Prediction:
        out = self(torch.from_numpy(np.concatenate([states, chunks], axis=1)))
        changes = out[..., :-2]
        mean, successes = changes.mean(0) * self.change_scale, torch.sigmoid(out[..., -1]).mean(0).numpy()
        return Prediction(
            next_states=states + mean.numpy(),
            rewards=out[..., -2].mean(0).numpy(),
            successes=successes,
            ends=np.zeros_like(successes),
            disagreement=changes.std(0).mean(-1).numpy(),
        )

    def list_starts(self, data: Transitions) -> NDArray[np.int64]:
        """Returns the first rows of episodes."""
        return np.flatnonzero(data.firsts > 0)[:MAX_STARTS]

    def infer_states(self, data: Transitions, rows: NDArray[np.int64]) -> FloatArray:
        return np.asarray(data.states[rows], np.float32)

    def decode(self, states: FloatArray) -> Array:
        return states.copy()

    def _measure(self, given: Tensor, change: Tensor) -> None:
        self.mean.copy_(given.mean(0))
        self.scale.copy_(given.std(0, unbiased=False).clamp(min=1e-4))
        if len(change):
            self.change_scale.copy_(change.square().mean(0).sqrt().clamp(min=1e-4))
        self.is_fitted.fill_(1)
