"""Aggregation of per-token losses to one number, with denominators of the whole minibatch.

Every aggregation is sum over tokens of (weight x loss) / denominator. A token's weight depends on its own sample only,
and the denominator is a sum over samples. So gradients can be accumulated unnormalised, in any pieces, and divided
once when the minibatch closes: the result does not depend on the split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.core.errors import UserError
from interlace.core.training import Aggregation


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregator:
    """One aggregation. aggregation_length: the divisor of `constant`, in tokens."""

    aggregation: Aggregation
    aggregation_length: int | None = None

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and not self.aggregation_length:
            raise UserError("aggregation 'constant' divides by a number of tokens: set aggregation_length.")

    def weights(self, lengths: Sequence[int], device: torch.device) -> Tensor | None:
        """Returns the [T] weight of each trained token; None if all are 1. lengths: trained tokens of each sample."""
        if self.aggregation != "seq_mean_token_mean":
            return None
        counts = torch.tensor(lengths)
        return (1.0 / counts.clamp(min=1)).repeat_interleave(counts).to(device)

    def denominator(self, lengths: Sequence[int]) -> float:
        """Returns these samples' part of the minibatch's denominator; a sample without trained tokens adds nothing."""
        sequences = sum(length > 0 for length in lengths)
        match self.aggregation:
            case "token_mean":
                return float(sum(lengths))
            case "seq_mean_token_mean" | "seq_mean_token_sum":
                return float(sequences)
            case "constant":
                return float(sequences * (self.aggregation_length or 0))
