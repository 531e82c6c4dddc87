"""Action heads of policies with numeric answers: sampling, log-probs and entropies.

Every head represents an answer as a token id. For a softmax over a vocabulary, the id is the index of a token. For the
heads in this file, the id is the 32-bit pattern of a float32 number. Samples, requests and files therefore have one
format. Such an id is never looked up in the embedding table: a query token stands in the context instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from interlace.core.errors import InterlaceError
from interlace.models.config import FLOW, GAUSSIAN, SQUASHED
from interlace.models.flow import read_schedule
from interlace.models.flow_guidance import guide_velocity
from interlace.models.number_ids import ids_to_numbers, numbers_to_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from interlace.core.guide import Guide
    from interlace.core.types import FloatArray
    from interlace.models.flow_head import FlowOutputs

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
"""Bounds of the logarithm of a standard deviation, in units of half an action's range."""
LARGEST_SQUASHED = 1 - 2.0**-22
"""Largest result of a hyperbolic tangent whose inverse is computed; float32 numbers below 1 are 2^-24 apart."""
SATURATED = 0.99
"""Number beyond which an action is as good as the end of its range."""
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
BLOCK = 16
"""Chains computed in one call. Smaller batches are padded to this number: all calls have the same shape, so the other
chains of a batch do not change the bits of a chain."""


class ActionHead(Protocol):
    """Distribution of answers, given the model's outputs. N: answers to draw, T: trained answers, V: outputs per
    answer.
    """

    takes_answers: bool
    """True if the output layer also reads the answers during training, because each answer depends on earlier ones."""

    def draw(
        self, outputs: Tensor, temperature: FloatArray, uniform: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Draws answers from outputs [N, V], by inverse CDF of uniform [N].

        temperature [N]; 0 is greedy. Returns ids [N] and their log-probs [N]. A greedy answer gets its log-prob at
        temperature 1.
        """

    def logprobs(self, outputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes log-probs of ids [T] and entropies [T], in nats, with gradient to outputs [T, V]."""


class GaussianHead:
    """Normal distribution of one number. The outputs are its mean and the logarithm of its standard deviation.

    The environment clips numbers beyond an action's range; log-probs refer to the numbers before clipping.
    """

    takes_answers = False

    def draw(
        self, outputs: Tensor, temperature: FloatArray, uniform: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Draws numbers; see ActionHead."""
        mean, log_std = _split_parameters(outputs)
        heat = torch.from_numpy(temperature).to(outputs.device)
        noise = _draw_normal(uniform, outputs.device)
        numbers = self._transform_draws(mean + noise * log_std.exp() * heat)
        scale = torch.where(heat > 0, heat, torch.ones_like(heat))
        logprobs = self._log_density(numbers, mean, log_std + scale.log())
        return numbers_to_ids(numbers.cpu().numpy()).astype(np.int64), logprobs.cpu().numpy()

    def logprobs(self, outputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes densities, and entropies of the normal distribution; see ActionHead."""
        mean, log_std = _split_parameters(outputs)
        log_std = log_std + math.log(temperature)
        return self._log_density(ids_to_numbers(ids), mean, log_std), log_std + HALF_LOG_TAU + 0.5

    @staticmethod
    def _transform_draws(drawn: Tensor) -> Tensor:
        """Returns the numbers of draws from the normal distribution."""
        return drawn

    @staticmethod
    def _log_density(numbers: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Computes the log-probs of transformed numbers, in nats."""
        return _log_density(numbers, mean, log_std)


class SquashedHead(GaussianHead):
    """Hyperbolic tangent of a normally distributed number (SAC, arXiv 1812.05905, appendix C).

    The outputs are the mean and the logarithm of the standard deviation before the tangent.

    A number at an end of the range, such as a clipped label of an expert, has the log-prob of all numbers beyond
    SATURATED. The inverse of the tangent is infinite there, and its bounded value of 8 would dominate an imitation.
    """

    @staticmethod
    def _transform_draws(drawn: Tensor) -> Tensor:
        return torch.tanh(drawn)

    @staticmethod
    def _log_density(numbers: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        # The density of a number at an end is not used, and moved inside so that its gradient is finite.
        inside = numbers.clamp(-LARGEST_SQUASHED, LARGEST_SQUASHED)
        density = _log_density(torch.atanh(inside), mean, log_std) - torch.log1p(-(inside**2))
        beyond = _log_normal_cdf((numbers.sign() * mean - math.atanh(SATURATED)) * torch.exp(-log_std))
        return torch.where(numbers.abs() < 1, density, beyond)

    @staticmethod
    def sample(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns numbers of outputs [..., 2] and their log-probs, [...] each, with gradient through the numbers.

        noise: [...] from the standard normal distribution.
        """
        mean, log_std = _split_parameters(outputs)
        before = mean + noise * log_std.exp()
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)), which does not overflow.
        slope = 2 * (math.log(2) - before - torch.nn.functional.softplus(-2 * before))
        return torch.tanh(before), -0.5 * noise**2 - log_std - HALF_LOG_TAU - slope


def _log_normal_cdf(z: Tensor) -> Tensor:
    """Computes the logarithm of the standard normal distribution's cumulative function, with finite gradients.

    The gradient of torch.special.log_ndtr overflows for very negative arguments. There, the asymptote is as exact.
    """
    is_tail = z < -100
    tail = z.clamp(max=-100)
    asymptote = -0.5 * tail**2 - torch.log(-tail) - HALF_LOG_TAU
    return torch.where(is_tail, asymptote, torch.special.log_ndtr(z.clamp(min=-100)))


class FlowHead:
    """Flow-matching head: a chain of steps from noise to a chunk of actions; see interlace/models/flow.py.

    The answers of a chunk are all numbers of its chain, state by state. In a rollout, the outputs are the conditions of
    the velocity network. In training, they are the mean and log standard deviation of each number.
    """

    takes_answers = True

    def __init__(self, layer: FlowOutputs, guides: Sequence[Guide | None] = ()) -> None:
        """layer: the model's output layer, which contains the velocity network. guides: of each chunk to draw, or
        empty.
        """
        self._layer, self._schedule, self._guides = layer, layer.schedule, guides

    def guided(self, guides: Sequence[Guide | None]) -> FlowHead:
        """Returns the head that draws as many chunks as there are guides, each with its known part."""
        return FlowHead(self._layer, guides)

    def draw(
        self, outputs: Tensor, temperature: FloatArray, uniform: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Draws whole chains; see ActionHead. A greedy chain starts at 0 and takes its steps without noise."""
        per_chain = self._schedule.num_tokens
        conditions = self._layer.conditions(outputs)
        noise = _draw_normal(uniform, outputs.device).view(-1, self._schedule.num_states, self._schedule.state_size)
        heat = torch.from_numpy(temperature).to(outputs.device)[::per_chain]
        numbers, parameters = [], []
        for first in range(0, len(conditions), BLOCK):
            block = slice(first, first + BLOCK)
            given, own_noise, own_heat = (_pad_block(rows[block]) for rows in (conditions, noise, heat))
            drawn, of_each = self._draw_block(given, own_noise, own_heat, self._guides[block])
            count = min(BLOCK, len(conditions) - first)
            numbers.append(drawn[:count])
            parameters.append(of_each[:count])
        chain, found = torch.cat(numbers).flatten(), torch.cat(parameters).flatten(0, 2)
        scale = torch.where(heat > 0, heat, torch.ones_like(heat)).repeat_interleave(per_chain)
        logprobs = _log_density(chain, found[:, 0], found[:, 1] + scale.log()) * self._is_real(chain)
        return numbers_to_ids(chain.cpu().numpy()).astype(np.int64), logprobs.cpu().numpy()

    def logprobs(self, outputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes densities; see ActionHead. Padding has log-prob 0. Padding and the initial noise have entropy 0."""
        if len(ids) % self._schedule.num_tokens:
            raise InterlaceError(f"{len(ids)} numbers are not whole chains of {self._schedule.num_tokens}")
        log_std, is_real = outputs[:, 1] + math.log(temperature), self._is_real(outputs)
        logprobs = _log_density(ids_to_numbers(ids), outputs[:, 0], log_std) * is_real
        places = torch.arange(len(ids), device=ids.device) % self._schedule.num_tokens
        is_step = is_real * (places >= self._schedule.state_size)
        return logprobs, (log_std + HALF_LOG_TAU + 0.5) * is_step

    def _draw_block(
        self, conditions: Tensor, noise: Tensor, heat: Tensor, guides: Sequence[Guide | None]
    ) -> tuple[Tensor, Tensor]:
        """Draws the chains [B, N + 1, K P] of B chunks, with mean and log standard deviation [B, N + 1, K P, 2]."""
        heat = heat[:, None]
        states = [noise[:, 0] * heat]
        parameters = [torch.zeros(*states[0].shape, 2, device=states[0].device)]
        for step in range(self._schedule.config.steps):
            velocity, mean, log_std = self._layer.step(conditions, states[-1], step)
            if guides:
                velocity = self._guide_velocity(conditions, states[-1], step, guides)
                mean = self._schedule.transition(step, states[-1], velocity)[0]
            greedy = self._schedule.deterministic(step, states[-1], velocity)
            drawn = mean + noise[:, step + 1] * log_std.exp() * heat
            states.append(torch.where(heat > 0, drawn, greedy))
            parameters.append(torch.stack([mean, log_std], -1))
        return torch.stack(states, 1), torch.stack(parameters, 1)

    def _guide_velocity(self, conditions: Tensor, state: Tensor, step: int, guides: Sequence[Guide | None]) -> Tensor:
        """Computes the velocities [B, K P] of a step, corrected towards the known parts of the first chunks."""
        with torch.inference_mode(False):  # the engine's tensors take no part in a gradient; copies do
            given = conditions.clone()
        filled = [*guides, *[None] * (len(state) - len(guides))]
        return guide_velocity(self._schedule, step, state, lambda x: self._layer.step(given, x, step)[0], filled)

    def _is_real(self, numbers: Tensor) -> Tensor:
        places = torch.arange(len(numbers), device=numbers.device) % self._schedule.padded_size
        return (places < self._schedule.size).float()


def answers_in_numbers(config: PretrainedConfig) -> bool:
    """Returns True if the model's answers are numbers instead of tokens of a vocabulary."""
    return getattr(config, "action_head", None) in (GAUSSIAN, SQUASHED, FLOW)


def chunk_shape(config: PretrainedConfig) -> tuple[int, int] | None:
    """Returns the shape [K, P] of a flow-matching model's chunk; None for other models."""
    if getattr(config, "action_head", None) != FLOW:
        return None
    schedule = read_schedule(config)
    return schedule.chunk, schedule.padded_size


def head_of(model: PreTrainedModel) -> ActionHead | None:
    """Returns the head that the model's configuration names; None for softmax over the outputs and for critics."""
    named = getattr(model.config, "action_head", None)
    if model.get_output_embeddings() is None:
        return None
    if named == GAUSSIAN:
        return GaussianHead()
    if named == SQUASHED:
        return SquashedHead()
    if named == FLOW:
        layer: FlowOutputs = model.get_output_embeddings()
        return FlowHead(layer)
    return None


def _draw_normal(uniform: NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.special.ndtri(torch.from_numpy(uniform)).to(device, torch.float32)


def _pad_block(rows: Tensor) -> Tensor:
    """Pads [n, ...] with zeros to [BLOCK, ...]."""
    missing = BLOCK - len(rows)
    return rows if not missing else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _split_parameters(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = outputs.float().unbind(-1)
    return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)


def _log_density(numbers: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((numbers - mean) * torch.exp(-log_std)) ** 2 - log_std - HALF_LOG_TAU
