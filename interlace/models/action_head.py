"""Heads of policies whose answers are numbers: how an answer is drawn, how likely it was, and how undecided they are.

An answer travels as a token id whatever the head: softmax over a vocabulary names a token of it, a Gaussian head's id
is the 32 bits of a float32 number. So a sample, a request and a file are alike for both, and no such id is ever looked
up in a table of embeddings: its place in the context is taken by a query token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from interlace.models.config import GAUSSIAN

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PretrainedConfig

    from interlace.core.types import FloatArray

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
"""Bounds of the logarithm of a standard deviation, in units of half an action's range."""
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class ActionHead(Protocol):
    """Distribution of one answer, given the outputs of a model for it. N answers, T trained ones, V outputs of each."""

    def draw(
        self, outputs: Tensor, temperature: FloatArray, uniform: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Draws from outputs [N, V], by inverse CDF of uniform [N]. temperature [N]; 0 is greedy. Returns ids [N] and
        their log-probs [N], those of a greedy answer under temperature 1."""
        ...

    def logprobs(self, outputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes log-probs of ids [T] and entropies [T], in nats, with gradient to outputs [T, V]."""
        ...


class GaussianHead:
    """Normal distribution of one number: outputs are its mean and the logarithm of its standard deviation.

    Numbers beyond an action's range are cut off by the environment alone, so log-probs are those of what was drawn.
    """

    def draw(
        self, outputs: Tensor, temperature: FloatArray, uniform: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Draws numbers; see ActionHead."""
        mean, log_std = _parameters(outputs)
        heat = torch.from_numpy(temperature).to(outputs.device)
        noise = torch.special.ndtri(torch.from_numpy(uniform)).to(outputs.device, torch.float32)
        numbers = mean + noise * log_std.exp() * heat
        scale = torch.where(heat > 0, heat, torch.ones_like(heat))
        logprobs = _log_density(numbers, mean, log_std + scale.log())
        return numbers_to_ids(numbers.cpu().numpy()).astype(np.int64), logprobs.cpu().numpy()

    def logprobs(self, outputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes densities; see ActionHead."""
        mean, log_std = _parameters(outputs)
        log_std = log_std + math.log(temperature)
        numbers = ids.to(torch.int32).view(torch.float32)
        return _log_density(numbers, mean, log_std), log_std + HALF_LOG_TAU + 0.5


def head_of(config: PretrainedConfig) -> GaussianHead | None:
    """Returns the head that a configuration names; None: softmax over the outputs, as for text."""
    return GaussianHead() if getattr(config, "action_head", None) == GAUSSIAN else None


def numbers_to_ids(numbers: FloatArray) -> NDArray[np.int32]:
    """Returns numbers as ids, bit for bit."""
    return np.ascontiguousarray(numbers, np.float32).view(np.int32)


def _parameters(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = outputs.float().unbind(-1)
    return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)


def _log_density(numbers: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((numbers - mean) * torch.exp(-log_std)) ** 2 - log_std - HALF_LOG_TAU
