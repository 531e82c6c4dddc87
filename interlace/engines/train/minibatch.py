"""An open minibatch: sums accumulated since the last optimizer step, and the metrics computed from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import mul

import torch
from torch import Tensor

from interlace.core.training import MAX_LOG_RATIO, LossInputs, LossOutputs
from interlace.core.types import Metrics
from interlace.engines.train.ranks import Ranks

SUMMED = ("skipped_minibatches",)
LARGEST = ("ratio_max",)
LATEST = ("failed_updates_in_a_row", "lr")
LOSS = "loss"
"""Name of the loss among the sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchTotals:
    """Sums of a minibatch, on one rank or over all ranks."""

    count: int
    """Number of items that are trained: tokens, or samples."""
    sums: Mapping[str, float]
    denominators: Mapping[str, float]
    """Divisor of each sum: of the loss its normaliser, else the number of summed tokens or samples."""
    maxima: Mapping[str, float]

    @property
    def denominator(self) -> float:
        """Returns the divisor of the loss and its gradient."""
        return self.denominators.get(LOSS, 0.0)

    def over_ranks(self, ranks: Ranks) -> MinibatchTotals:
        """Adds up the totals of all ranks, which are sent as text; all numbers stay exact. Collective."""
        # Ranks that were called with the same samples have the same sums.
        texts = ranks.gather_texts(json.dumps(asdict(self)))[:: ranks.shape.copies]
        return self.add_up([MinibatchTotals(**json.loads(text)) for text in texts])

    @classmethod
    def add_up(cls, parts: Sequence[MinibatchTotals]) -> MinibatchTotals:
        return cls(
            count=sum(part.count for part in parts),
            sums=_combine(sum, [part.sums for part in parts]),
            denominators=_combine(sum, [part.denominators for part in parts]),
            maxima=_combine(max, [part.maxima for part in parts]),
        )

    def metrics(self) -> Metrics:
        """Returns means and maxima. Empty if nothing was added; a name without numbers has no mean."""
        means = {name: total / count for name, total in self.sums.items() if (count := self.denominators[name])}
        return means | dict(self.maxima)


def _combine(function: Callable[[list[float]], float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: function([part[name] for part in parts if name in part]) for name in names}


class Minibatch:
    """Sums over the tokens or samples that one rank trains. They stay on the device until the minibatch closes."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}
        self._denominators: dict[str, float] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, *, loss: Tensor, values: Mapping[str, Tensor], count: int, denominator: float) -> None:
        """Adds one micro-batch. loss: its unnormalised sum. values: name -> [count], reported as means."""
        self.count += count
        self._add_sum(LOSS, loss.detach(), denominator)
        self.add_values(values)

    def add_values(self, values: Mapping[str, Tensor]) -> None:
        """Adds numbers of a micro-batch's samples, or of some of its tokens. values: name -> [any], reported as means.

        A mean counts each number once, over all micro-batches and ranks.
        """
        for name, value in values.items():
            self._add_sum(name, value.detach().sum(), float(len(value)))

    def add_max(self, name: str, value_T: Tensor) -> None:
        """Reports the largest of [T] over the minibatch."""
        largest = value_T.detach().max()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def close(self) -> MinibatchTotals:
        """Returns the totals. Waits for the device."""
        numbers = [*self._sums.values(), *self._maxima.values()]
        read = iter(torch.stack(numbers).tolist() if numbers else [])
        return MinibatchTotals(
            count=self.count,
            sums={name: next(read) for name in self._sums},
            denominators=dict(self._denominators),
            maxima={name: next(read) for name in self._maxima},
        )

    def _add_sum(self, name: str, total: Tensor, denominator: float) -> None:
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._denominators[name] = self._denominators.get(name, 0.0) + denominator


def policy_values(inputs: LossInputs, outputs: LossOutputs) -> dict[str, Tensor]:
    """Computes per-token quantities that every policy loss reports, [T] each, detached.

    kl: KL divergence from the policy at the start of the step, by the non-negative estimator r - 1 - log r.
    step_ratio_mean: r, current over proximal policy. ratio_mean: current over behaviour policy; its square gives the
    effective sample size. Both are clamped as in the losses, so that squares stay finite and are not 0 in all tokens.
    logprob_gap: absolute difference between trained and sampled log-probs.
    """
    logprobs_T = inputs.logprobs_T.detach()
    log_step_T, log_ratio_T = logprobs_T - inputs.proximal_logprobs_T, logprobs_T - inputs.behaviour_logprobs_T
    step_T, ratio_T = (gap_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() for gap_T in (log_step_T, log_ratio_T))
    return {
        "entropy": inputs.entropy_T,
        "kl": step_T - 1 - log_step_T,
        "step_ratio_mean": step_T,
        "ratio_mean": ratio_T,
        "ratio_square": ratio_T.square(),
        "logprob_gap": log_ratio_T.abs(),
        **outputs.metrics_T,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchReport:
    """Metrics of a closed minibatch."""

    metrics: Metrics
    weights: Mapping[str, float]
    """Weight of each mean in the mean over the step's minibatches: its denominator. All others count equally."""


def merge_metrics(minibatches: Sequence[MinibatchReport]) -> Metrics:
    """Merges the metrics of minibatches into a step's: weighted means, except for sums, maxima and latest values."""
    merged: Metrics = {}
    for name in dict.fromkeys(name for report in minibatches for name in report.metrics):
        found = [report for report in minibatches if name in report.metrics]
        values = [report.metrics[name] for report in found]
        base = name.rpartition("/")[2]
        if base in SUMMED:
            merged[name] = sum(values)
        elif base in LARGEST:
            merged[name] = max(values)
        elif base in LATEST:
            merged[name] = values[-1]
        else:
            weights = [report.weights.get(name, 1.0) for report in found]
            merged[name] = sum(map(mul, values, weights)) / sum(weights)
    return merged
