"""World model of pictures: a recurrent state-space model (PlaNet, arXiv 1811.04551; DreamerV3, arXiv 2301.04104).

A state of the model is a deterministic part h, kept by a GRU, and a stochastic part z, which is normally distributed. A
network predicts z from h (the prior), another one infers it from h and the picture (the posterior), and a decoder draws
the picture from both. A chunk of actions leads to the next h, from which the reward of the chunk, the success and the
end of the task are predicted. The loss is the error of pictures and of these predictions, and the Kullback-Leibler
divergence of prior and posterior with free bits and separate weights for the two (KL balancing).

Differences from DreamerV3: z is normally distributed, as in PlaNet; the heads read h alone, because the last
observation of an episode is not recorded; rewards are scaled by the data and have a squared error; pictures are
differences from the mean picture; imagination takes the mean of the prior, so that a chunk has one result; and the
policy sees decoded pictures.

Shapes: as in model.py; B = sequences, L = chunks of a sequence, S = side of a picture, R = numbers of h, Z = numbers of
z, D = R + Z.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.config import LatentConfig
from interlace.models.inputs import IMAGE
from interlace.robots.world_model.model import MAX_STARTS, Prediction, Transitions, WorldModel, WorldModelConfig
from interlace.rollouts.envs.spec import Array, ArraySpec

MOMENTS = "optimizer.safetensors"
"""File of a saved model with the moments of the optimizer."""
PICTURE_WEIGHT = 100.0
"""Weight of the error of pictures, in units of the typical change per chunk, against the other losses, in nats."""
PRIOR_WEIGHT, POSTERIOR_WEIGHT, FREE_NATS = 1.0, 0.1, 1.0
"""Weights of the divergence with the gradient of the prior and of the posterior, and its part without gradient, as in
DreamerV3."""
MIN_STD = 0.1
"""Smallest standard deviation of z, as in PlaNet."""
MAX_NORM = 100.0
"""Largest norm of a gradient."""


class LatentModelConfig(LatentConfig, WorldModelConfig):
    """Sizes of a latent model."""

    image_size: int = Field(ge=16, multiple_of=16)
    """Side of a picture in pixels, S."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filtered:
    """States of the model in sequences of real pictures and chunks."""

    hidden: Tensor
    """[B, L, R] h before the chunk."""
    stochastic: Tensor
    """[B, L, Z] z, drawn from the posterior, or its mean."""
    posterior: Tensor
    """[B, L, 2 Z] mean and standard deviation."""
    after: Tensor
    """[B, L, R] h after the chunk."""


class LatentModel(WorldModel):
    """The recurrent state-space model. Chunks, rewards and pictures are scaled by the data of the first fit."""

    array = IMAGE
    config: LatentModelConfig
    chunk_mean: Tensor
    """[C] mean of the chunks."""
    chunk_scale: Tensor
    """[C] standard deviation of the chunks."""
    reward_mean: Tensor
    """Mean reward of a chunk."""
    reward_scale: Tensor
    """Standard deviation of the rewards of chunks."""
    background: Tensor
    """[3, S, S] mean picture, 0 to 1."""

    def __init__(self, config: LatentModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.moments: Mapping[str, Tensor] = {}
        """Moments of the optimizer after the last fit, by parameter and name. Empty before the first fit."""
        filters, side = config.filters, config.image_size
        widths = [filters, 2 * filters, 4 * filters, 4 * filters]
        coded = (side // 16, widths[-1] * (side // 16) ** 2)
        size, stochastic = config.recurrent_size, config.stochastic_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(*_downsample([3, *widths]), nn.Flatten())
            self.decoder = nn.Sequential(
                nn.Linear(size + stochastic, coded[1]),
                nn.Unflatten(1, (widths[-1], coded[0], coded[0])),
                *_upsample([*reversed(widths), 3]),
            )
            self.joined = _make_layer(stochastic + config.chunk * config.action_size, size)
            self.cell = nn.GRUCell(size, size)
            self.prior = nn.Sequential(
                _make_layer(size, config.hidden_size), nn.Linear(config.hidden_size, 2 * stochastic)
            )
            self.posterior = nn.Sequential(
                _make_layer(size + coded[1], config.hidden_size), nn.Linear(config.hidden_size, 2 * stochastic)
            )
            self.heads = nn.Sequential(_make_layer(size, config.hidden_size), nn.Linear(config.hidden_size, 3))
        numbers = config.chunk * config.action_size
        for name, shape in (("chunk_mean", (numbers,)), ("reward_mean", ()), ("background", (3, side, side))):
            self.register_buffer(name, torch.zeros(shape))
        for name, shape in (("chunk_scale", (numbers,)), ("reward_scale", ()), ("change_scale", ())):
            self.register_buffer(name, torch.ones(shape))
        self.register_buffer("is_fitted", torch.zeros(()))

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Spec of `image`."""
        side = self.config.image_size
        return {self.array: ArraySpec(shape=(side, side, 3), dtype="uint8")}

    def fit(self, data: Transitions, *, steps: int, seed: int = 0) -> float:
        """Trains on sequences that are drawn uniformly; see WorldModel. The optimizer continues from the last fit."""
        if not len(data):
            raise UserError("a world model was given no transitions to learn from: collect episodes first")
        if not self.is_fitted:
            self._measure(data)
        config, device = self.config, self.background.device
        optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate)
        _restore_moments(optimizer, self.moments)
        noise, losses = torch.Generator().manual_seed(seed), []
        length = min(config.sequence_length, len(data))
        for _ in range(steps):
            first = torch.randint(len(data) - length + 1, (config.sequences, 1), generator=noise)
            rows = (first + torch.arange(length)).numpy()
            loss = self._compute_loss(data, rows, noise, device)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(float(loss.detach()))
        state = optimizer.state_dict()["state"]
        self.moments = {
            f"{place}.{name}": value.cpu() for place, values in state.items() for name, value in values.items()
        }
        return float(np.mean(losses[-max(1, steps // 10) :]))

    @torch.no_grad()
    def predict(self, states: FloatArray, chunks: FloatArray) -> Prediction:
        hidden, stochastic = torch.from_numpy(states).split(
            [self.config.recurrent_size, self.config.stochastic_size], -1
        )
        after = self._advance(hidden, stochastic, torch.from_numpy(chunks))
        following, _ = _read_normal(self.prior(after)).chunk(2, -1)
        reward, success, end = self.heads(after).unbind(-1)
        return Prediction(
            next_states=torch.cat([after, following], -1).numpy(),
            rewards=(reward * self.reward_scale + self.reward_mean).numpy(),
            successes=torch.sigmoid(success).numpy(),
            ends=torch.sigmoid(end).numpy(),
        )

    def list_starts(self, data: Transitions) -> NDArray[np.int64]:
        """Returns rows anywhere in the episodes, in a fixed random order."""
        return np.random.default_rng(0).permutation(len(data))[:MAX_STARTS]

    @torch.no_grad()
    def infer_states(self, data: Transitions, rows: NDArray[np.int64]) -> FloatArray:
        """Infers the states from the last `context_chunks` pictures and chunks of an episode."""
        before = np.arange(1 - self.config.context_chunks, 1)
        # Rows of an earlier episode are forgotten at the first row of the next, and so are repetitions of row 0.
        given = self._take(data, np.maximum(rows[:, None] + before, 0), self.background.device)
        found = self._filter(given, None)
        return torch.cat([found.hidden[:, -1], found.stochastic[:, -1]], -1).cpu().numpy()

    @torch.no_grad()
    def decode(self, states: FloatArray) -> Array:
        """Draws the pictures in states, [B, S, S, 3] uint8."""
        pictures = (self._draw(torch.from_numpy(states)) * 255).round().clamp(0, 255)
        return pictures.permute(0, 2, 3, 1).to(torch.uint8).numpy()

    def save(self, folder: Path, starts: FloatArray, errors: Mapping[int, float] | None = None) -> None:
        super().save(folder, starts, errors)
        save_file(dict(self.moments), folder / MOMENTS)

    def _compute_loss(
        self, data: Transitions, rows: NDArray[np.int64], noise: torch.Generator, device: torch.device
    ) -> Tensor:
        """Computes the loss of sequences. rows: [B, L]."""
        given = self._take(data, rows, device)
        found = self._filter(given, noise)
        drawn = self._draw(torch.cat([found.hidden, found.stochastic], -1).flatten(0, 1))
        error = F.mse_loss(drawn, given.pictures.flatten(0, 1)) * (255 / self.change_scale) ** 2
        prior = _read_normal(self.prior(found.hidden))
        to_prior = _diverge(found.posterior.detach(), prior).clamp(min=FREE_NATS)
        to_posterior = _diverge(found.posterior, prior.detach()).clamp(min=FREE_NATS)
        # The first state of a sequence has no past, from which the prior could predict it.
        is_later = 1 - given.firsts
        divergence = ((PRIOR_WEIGHT * to_prior + POSTERIOR_WEIGHT * to_posterior) * is_later).mean()
        reward, success, end = self.heads(found.after).unbind(-1)
        loss = PICTURE_WEIGHT * error + divergence
        loss = loss + F.mse_loss(reward, (given.rewards - self.reward_mean) / self.reward_scale)
        loss = loss + F.binary_cross_entropy_with_logits(success, given.successes)
        return loss + F.binary_cross_entropy_with_logits(end, given.ends)

    def _take(self, data: Transitions, rows: NDArray[np.int64], device: torch.device) -> "Sequences":
        """Returns sequences of transitions as tensors. rows: [B, L]."""
        firsts = data.firsts[rows]
        firsts[:, 0] = 1
        columns = (data.chunks[rows], firsts, data.rewards[rows], data.successes[rows], data.ends[rows])
        chunks, firsts_BL, rewards, successes, ends = (torch.from_numpy(column).to(device) for column in columns)
        pictures = torch.from_numpy(np.asarray(data.states[rows])).to(device)
        return Sequences(
            pictures=pictures.permute(0, 1, 4, 2, 3).float() / 255,
            chunks=chunks, firsts=firsts_BL, rewards=rewards, successes=successes, ends=ends,
        )  # fmt: skip

    def _filter(self, given: "Sequences", noise: torch.Generator | None) -> Filtered:
        """Infers the states of sequences. noise: of the draws of z; None for its mean."""
        pictures = given.pictures - self.background
        coded = self.encoder(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
        after = coded.new_zeros(len(coded), self.config.recurrent_size)
        steps = []
        for place in range(coded.shape[1]):
            hidden = after * (1 - given.firsts[:, place, None])
            posterior = _read_normal(self.posterior(torch.cat([hidden, coded[:, place]], -1)))
            stochastic = _draw_normal(posterior, noise)
            after = self._advance(hidden, stochastic, given.chunks[:, place])
            steps.append((hidden, stochastic, posterior, after))
        columns = [torch.stack(column, 1) for column in zip(*steps, strict=True)]
        return Filtered(hidden=columns[0], stochastic=columns[1], posterior=columns[2], after=columns[3])

    def _advance(self, hidden: Tensor, stochastic: Tensor, chunks: Tensor) -> Tensor:
        """Returns h after chunks, [B, R]."""
        scaled = (chunks - self.chunk_mean) / self.chunk_scale
        return self.cell(self.joined(torch.cat([stochastic, scaled], -1)), hidden)

    def _draw(self, states: Tensor) -> Tensor:
        """Draws pictures, [B, 3, S, S], in 0 to 1."""
        return self.decoder(states) + self.background

    def _measure(self, data: Transitions) -> None:
        chunks, rewards = torch.from_numpy(data.chunks), torch.from_numpy(data.rewards)
        rows = self.list_starts(data)
        self.chunk_mean.copy_(chunks.mean(0))
        self.chunk_scale.copy_(chunks.std(0, unbiased=False).clamp(min=1e-4))
        self.reward_mean.copy_(rewards.mean())
        # Rewards that are all alike keep their unit.
        spread = float(rewards.std(unbiased=False))
        self.reward_scale.fill_(spread if spread > 1e-6 else 1.0)
        pictures = torch.from_numpy(np.asarray(data.states[rows])).float()
        self.background.copy_(pictures.mean(0).permute(2, 0, 1) / 255)
        rows = rows[data.has_next[rows] > 0]
        if len(rows):
            moved = np.asarray(data.next_states[rows], np.float32) - np.asarray(data.states[rows], np.float32)
            self.change_scale.fill_(max(float(np.sqrt((moved**2).mean())), 1e-2))
        self.is_fitted.fill_(1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Consecutive transitions, [B, L] each unless another shape is given."""

    pictures: Tensor
    """[B, L, 3, S, S] before the chunks, 0 to 1."""
    chunks: Tensor
    """[B, L, C]."""
    firsts: Tensor
    """1 if the state of the model starts from zero: at the first chunk of an episode or of a sequence."""
    rewards: Tensor
    successes: Tensor
    ends: Tensor


def _make_layer(given: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(given, width), nn.LayerNorm(width), nn.SiLU())


def _downsample(widths: Sequence[int]) -> list[nn.Module]:
    """Returns layers that each halve the side of a picture. widths: channels before, between and after them."""
    return [
        layer
        for given, width in pairwise(widths)
        for layer in (nn.Conv2d(given, width, 4, stride=2, padding=1), nn.GroupNorm(1, width), nn.SiLU())
    ]


def _upsample(widths: Sequence[int]) -> list[nn.Module]:
    """Returns layers that each double the side of a picture; the last one is linear."""
    return [
        layer
        for given, width in pairwise(widths)
        for layer in (
            nn.GroupNorm(1, given), nn.SiLU(), nn.ConvTranspose2d(given, width, 4, stride=2, padding=1)
        )
    ]  # fmt: skip


def _read_normal(outputs: Tensor) -> Tensor:
    """Returns mean and standard deviation, [..., 2 Z], from the outputs of a network."""
    mean, width = outputs.chunk(2, -1)
    return torch.cat([mean, F.softplus(width) + MIN_STD], -1)


def _draw_normal(normal: Tensor, noise: torch.Generator | None) -> Tensor:
    """Draws numbers, [..., Z]. noise: on the host, so that draws do not depend on the device; None for the mean."""
    mean, std = normal.chunk(2, -1)
    return mean if noise is None else mean + std * torch.randn(mean.shape, generator=noise).to(mean.device)


def _diverge(normal: Tensor, other: Tensor) -> Tensor:
    """Returns the Kullback-Leibler divergence of normal distributions, summed over Z, [...], in nats."""
    mean, std = normal.chunk(2, -1)
    other_mean, other_std = other.chunk(2, -1)
    share = (std / other_std) ** 2
    return 0.5 * (share + ((mean - other_mean) / other_std) ** 2 - 1 - share.log()).sum(-1)


def _restore_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        place, name = key.split(".")
        state.setdefault(int(place), {})[name] = value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
