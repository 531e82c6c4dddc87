"""An open minibatch: what has been added up since the last optimizer step, and the metrics made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.training import LossInputs, LossOutputs
    from interlace.core.types import Metrics

SUMMED = ("skipped_minibatches",)
LARGEST = ("ratio_max",)


class Minibatch:
    """Sums over what it trains: tokens, or samples. They stay on the device until the minibatch closes.

    Data-parallel ranks would add `count`, `denominator` and the sums over ranks just before they are read.
    """

    def __init__(self) -> None:
        self.count = 0
        self.denominator = 0.0
        """Of the loss, so far."""
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, *, loss: Tensor, values: Mapping[str, Tensor], count: int, denominator: float) -> None:
        """Adds one micro-batch. loss: its unnormalised sum. values: name -> [count], reported as means."""
        self.count += count
        self.denominator += denominator
        self._add_sum("loss", loss.detach())
        for name, value in values.items():
            self._add_sum(name, value.detach().sum())

    def add_max(self, name: str, value_T: Tensor) -> None:
        """Reports the largest of [T] over the minibatch."""
        largest = value_T.detach().max()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def metrics(self) -> Metrics:
        """Loss over its denominator, means, maxima. Empty where nothing was added. Waits for the device."""
        if not self._sums:
            return {}
        names = [*self._sums, *self._maxima]
        numbers = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        read = dict(zip(names, numbers, strict=True))
        metrics = {name: read[name] / self.count for name in self._sums}
        metrics["loss"] = read["loss"] / self.denominator
        return metrics | {name: read[name] for name in self._maxima}

    def _add_sum(self, name: str, total: Tensor) -> None:
        self._sums[name] = self._sums[name] + total if name in self._sums else total


def policy_values(inputs: LossInputs, outputs: LossOutputs) -> dict[str, Tensor]:
    """Per-token quantities that every policy loss reports, [T] each, detached.

    kl: of the policy from the one at the start of the step, by the non-negative estimator r - 1 - log r.
    step_ratio_mean: r, current over proximal. ratio_mean: current over behaviour; from its square comes the
    effective sample size. logprob_gap: between trained and sampled log-probs, absolute.
    """
    logprobs_T = inputs.logprobs_T.detach()
    log_step_T, log_ratio_T = logprobs_T - inputs.proximal_logprobs_T, logprobs_T - inputs.behaviour_logprobs_T
    step_T, ratio_T = log_step_T.exp(), log_ratio_T.exp()
    return {
        "entropy": inputs.entropy_T,
        "kl": step_T - 1 - log_step_T,
        "step_ratio_mean": step_T,
        "ratio_mean": ratio_T,
        "ratio_square": ratio_T.square(),
        "logprob_gap": log_ratio_T.abs(),
        **outputs.metrics_T,
    }


def merge_metrics(minibatches: Sequence[Metrics]) -> Metrics:
    """Metrics of a step from those of its minibatches: means, except for counts (summed) and maxima."""
    merged: Metrics = {}
    for name in dict.fromkeys(name for metrics in minibatches for name in metrics):
        values = [metrics[name] for metrics in minibatches if name in metrics]
        base = name.rpartition("/")[2]
        if base in SUMMED:
            merged[name] = sum(values)
        elif base in LARGEST:
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
