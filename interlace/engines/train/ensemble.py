"""Ensemble of small networks of one shape: critics of off-policy algorithms.

Shapes: B = rows, N = networks.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from interlace.algorithms.replayed import ReplayedSettings

STATISTICS_DECAY, STATISTICS_EPSILON = 0.99, 1e-3
"""Share of the running statistics that a batch leaves, and the number added to a variance (arXiv 1902.05605)."""


class Ensemble(nn.Module):
    """N independent networks with one output, each with separate random weights."""

    def __init__(
        self, num_inputs: int, settings: ReplayedSettings, *, seed: int, count: int = 1, batch_norm: bool = False
    ) -> None:
        """batch_norm: True to normalise the input of each layer by statistics of the batch."""
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        widths = [num_inputs, *[settings.critic_width] * settings.critic_layers, 1]
        sizes = [*pairwise(widths)]

        def uniform(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*shape, generator=noise) - 1) / math.sqrt(fan_in))

        self.weights = nn.ParameterList([uniform(count, *size, fan_in=size[0]) for size in sizes])
        self.biases = nn.ParameterList([uniform(count, 1, size[1], fan_in=size[0]) for size in sizes])
        self._layer_norm = settings.layer_norm
        self.norms = nn.ModuleList([_BatchNorm(count, size[0]) for size in sizes] if batch_norm else [])
        # A ParameterList finds an entry by its name, which takes as long as a small operation on tensors.
        self._layers, self._norms = tuple(zip(self.weights, self.biases, strict=True)), tuple(self.norms)

    def forward(self, *given: Tensor, fits_statistics: bool = False) -> Tensor:
        """Computes values [N, B] of rows that are joined from `given`, [B, ...] each.

        fits_statistics: True to normalise by the statistics of these rows and to add them to the running ones.
        """
        rows = torch.cat(given, 1)
        found = rows.expand(len(self._layers[0][0]), *rows.shape)
        last = len(self._layers) - 1
        for place, (weight, bias) in enumerate(self._layers):
            if self._norms:
                found = self._norms[place](found, fits_statistics)
            found = torch.baddbmm(bias, found, weight)
            if place < last:
                if self._layer_norm:
                    found = nn.functional.layer_norm(found, found.shape[-1:])
                found = torch.relu(found)
        return found.squeeze(-1)


class _BatchNorm(nn.Module):
    """Batch normalisation of N networks (arXiv 1502.03167)."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(count, 1, size)), nn.Parameter(torch.zeros(count, 1, size))
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(count, 1, size))
        self.register_buffer("variance", torch.ones(count, 1, size))

    def forward(self, rows_NBI: Tensor, fits_statistics: bool) -> Tensor:
        """Normalises each number over the rows."""
        mean, variance = self.mean, self.variance
        if fits_statistics:
            variance, mean = torch.var_mean(rows_NBI, 1, unbiased=False, keepdim=True)
            with torch.no_grad():
                self.mean.lerp_(mean.detach(), 1 - STATISTICS_DECAY)
                self.variance.lerp_(variance.detach(), 1 - STATISTICS_DECAY)
        return (rows_NBI - mean) * torch.rsqrt(variance + STATISTICS_EPSILON) * self.scale + self.shift
