"""World model: a small ensemble, trained on trajectories, that predicts the result of a chunk of actions.

From a state vector and a chunk of actions, each member predicts the change of the state, the reward and whether the
task is then solved. Disagreement between members indicates sparse data, and limits the length of imagined episodes.
Shapes: B = transitions, M = members, D = numbers of a state, C = numbers of a chunk (K actions of A numbers each).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.errors import UserError
from interlace.core.types import FINAL, FloatArray, IntArray, Sample, Segment
from interlace.models.config import EnsembleConfig
from interlace.models.published import newest_model

_WEIGHTS, _CONFIG, _STARTS = "world_model.safetensors", "world_model.json", "starts.npy"


class WorldModelConfig(EnsembleConfig):
    """Sizes of a world model."""

    state_size: int = Field(ge=1)
    """Size of a state, D."""
    action_size: int = Field(ge=1)
    """Size of an action, A."""
    chunk: int = Field(ge=1)
    """Actions of a chunk, K."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transitions:
    """Executed chunks."""

    states: FloatArray
    """[B, D] state before the chunk."""
    chunks: FloatArray
    """[B, C] concatenated actions."""
    next_states: FloatArray
    """[B, D] state after the chunk; undefined if has_next is 0."""
    has_next: FloatArray
    """[B] 1 if the state after the chunk is known, else 0: the last turn of an episode has no successor."""
    rewards: FloatArray
    """[B] reward of the chunk."""
    successes: FloatArray
    """[B] 1 if the chunk solved the task, else 0."""
    firsts: FloatArray
    """[B] 1 at the first chunk of an episode, else 0. The chunks of an episode are consecutive and in order."""

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """Mean prediction of the ensemble."""

    next_states: FloatArray
    """[B, D] state after the chunk."""
    rewards: FloatArray
    """[B] reward of the chunk."""
    successes: FloatArray
    """[B] probability that the task is then solved."""
    disagreement: FloatArray
    """[B] standard deviation of the state between members, in units of the data's spread, averaged over D."""


def transitions_of(
    samples: Iterable[Sample],
    decode: Callable[[IntArray], FloatArray],
    solved: Callable[[Sample], bool] = lambda sample: (sample.reward or 0.0) > 0,
) -> Transitions:
    """Converts a robot's samples, such as a replay buffer's, to transitions.

    decode: converts a turn's action tokens to actions, [K, A]. solved: returns whether a sample solved its task, which
    it did with its last chunk. Raises UserError for samples whose turns have no `state`.
    """
    rows: list[tuple[FloatArray, FloatArray, FloatArray, float, float, float, float]] = []
    for sample in samples:
        turns = [
            each for each in sample.segments if each.kind != FINAL and (each.sampled is None or each.sampled.any())
        ]
        states = [_state(sample, turn) for turn in turns]
        states += [_state(sample, each) for each in sample.segments[-1:] if each.kind == FINAL]  # it has no answer
        for place, turn in enumerate(turns):
            is_known, is_last = place + 1 < len(states), place == len(turns) - 1
            following = states[place + 1] if is_known else states[place]
            chunk = decode(turn.token_ids).reshape(-1)
            numbers = float(is_known), float(turn.reward or 0.0), float(is_last and solved(sample)), float(place == 0)
            rows.append((states[place], chunk, following, *numbers))
    names = ("states", "chunks", "next_states", "has_next", "rewards", "successes", "firsts")
    columns = [np.asarray(column, np.float32) for column in zip(*rows, strict=True)]
    empty = np.zeros((0, 0), np.float32)
    return Transitions(**dict(zip(names, columns or [empty] * len(names), strict=True)))


class WorldModel(nn.Module):
    """The ensemble. States and chunks are scaled by the spread of the data of the first fit."""

    def __init__(self, config: WorldModelConfig, *, seed: int = 0) -> None:
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
        self.mean: Tensor
        self.scale: Tensor
        self.change_scale: Tensor
        self.is_fitted: Tensor

    def forward(self, given_BG: Tensor) -> Tensor:
        """Returns [M, B, D + 2]: scaled change of the state, reward, logit of success. given: states, then chunks."""
        x = ((given_BG - self.mean) / self.scale).expand(self.config.members, *given_BG.shape[-2:])
        for weight, bias in zip(self.weights, self.biases, strict=True):
            is_last = weight is self.weights[-1]
            x = torch.baddbmm(bias, x, weight)
            x = x if is_last else F.silu(x)
        return x

    def fit(self, data: Transitions, *, steps: int, batch_size: int = 256, lr: float = 1e-3, seed: int = 0) -> float:
        """Trains all members, each on separate draws. Returns the mean loss of the last tenth of the steps."""
        if not len(data):
            raise UserError("a world model was given no transitions to learn from: collect episodes first")
        given = torch.from_numpy(np.concatenate([data.states, data.chunks], axis=1))
        change = torch.from_numpy(data.next_states - data.states)
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
        """Predicts the results of chunks, [B, C], from states, [B, D]."""
        out = self(torch.from_numpy(np.concatenate([states, chunks], axis=1)))
        changes = out[..., :-2]
        mean = changes.mean(0) * self.change_scale
        return Prediction(
            next_states=states + mean.numpy(),
            rewards=out[..., -2].mean(0).numpy(),
            successes=torch.sigmoid(out[..., -1]).mean(0).numpy(),
            disagreement=changes.std(0).mean(-1).numpy(),
        )

    def save(self, folder: Path, starts: FloatArray) -> None:
        """Writes the model, and the initial states of imagined episodes, [starts, D]."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / _WEIGHTS)
        (folder / _CONFIG).write_text(self.config.model_dump_json(indent=1), encoding="utf-8")
        np.save(folder / _STARTS, np.asarray(starts, np.float32), allow_pickle=False)

    def _measure(self, given: Tensor, change: Tensor) -> None:
        self.mean.copy_(given.mean(0))
        self.scale.copy_(given.std(0, unbiased=False).clamp(min=1e-4))
        if len(change):
            self.change_scale.copy_(change.std(0, unbiased=False).clamp(min=1e-4))
        self.is_fitted.fill_(1)


def load_world_model(folder: Path) -> tuple[WorldModel, FloatArray]:
    """Reads a model, or the newest model that a run published in a folder, and its initial states, [starts, D].

    Raises UserError if files are missing.
    """
    folder = newest_model(folder) or folder
    missing = [name for name in (_WEIGHTS, _CONFIG, _STARTS) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} holds no world model: {missing[0]} is missing. WorldModel.save() writes one.")
    config = WorldModelConfig.parse(json.loads((folder / _CONFIG).read_text(encoding="utf-8")), where=str(folder))
    model = WorldModel(config)
    model.load_state_dict(load_file(folder / _WEIGHTS))
    starts: FloatArray = np.load(folder / _STARTS, allow_pickle=False)
    return model.eval(), starts


def error_by_horizon(model: WorldModel, data: Transitions, horizons: Sequence[int]) -> dict[int, float]:
    """Returns the distance of imagined states from the real ones of the same episodes, by number of chunks from the
    start.

    The distance is a root mean square over episodes and state numbers, in units of each number's typical change per
    chunk.
    A horizon longer than all episodes is omitted.
    """
    begins, found = np.flatnonzero(data.firsts > 0), {}
    ends = np.append(begins[1:], len(data))
    imagined, scale = data.states[begins], model.change_scale.cpu().numpy()
    for step in range(max(horizons)):
        lasts = begins + step < ends
        begins, ends, imagined = begins[lasts], ends[lasts], imagined[lasts]
        lasts = data.has_next[begins + step] > 0
        begins, ends, imagined = begins[lasts], ends[lasts], imagined[lasts]
        if not len(begins):
            break
        imagined = model.predict(imagined, data.chunks[begins + step]).next_states
        if step + 1 in horizons:
            gap = (imagined - data.next_states[begins + step]) / scale
            found[step + 1] = float(np.sqrt((gap**2).mean()))
    return found


def _state(sample: Sample, turn: Segment) -> FloatArray:
    """Returns the state that a turn observed: from its arrays, or from the arrays of its context."""
    context = sample.segments[turn.parent] if turn.parent is not None and turn.parent >= 0 else turn
    inputs = turn.inputs if turn.inputs is not None else context.inputs
    state = inputs.get("state") if isinstance(inputs, Mapping) else None
    if state is None:
        raise UserError(f"sample {sample.key} has a turn without a `state`: a world model learns from state vectors")
    return np.asarray(state, np.float32).reshape(-1)
