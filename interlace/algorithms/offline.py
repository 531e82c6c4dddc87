"""Base of algorithms that train on given rows: no policy generates, and no reward is computed.

A pair is one sample with two branches below its prompt, so it is never split over micro-batches. Shapes: T = tokens of
both completions of all pairs of a micro-batch, N = pairs in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs
from interlace.core.types import SampleGroup

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.training import LossInputs


class OfflineAlgorithm(Algorithm):
    """A subclass names the kind of its rows and defines the loss.

    The rows come as samples whose advantages are the sign of each token: 1 in a completion to imitate or a chosen one,
    -1 in a rejected one.
    """

    trains_scores: ClassVar[bool] = False
    """True if the trained model is a classifier: the loss then gets its scores in place of log-probs."""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def uses_reference_point(self) -> bool:
        """Returns whether the loss reads the mean log ratio of mismatched completions as `baseline_T`."""
        return False

    def advantages(self, group: SampleGroup) -> Advantages:
        raise ValueError(f"{type(self).__name__} trains on given rows, and group {group.gid} is one of samples")


class PairSettings(AlgorithmConfig):
    """Settings of every loss on pairs."""

    aggregation: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    """A pair has one loss, which its tokens share: the loss is the mean over the pairs of the minibatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Chosen and rejected tokens of a micro-batch."""

    inputs: LossInputs
    is_chosen_T: Tensor
    """[T] 1 on tokens of chosen completions, 0 on those of rejected ones."""

    @classmethod
    def of(cls, inputs: LossInputs) -> Pairs:
        """Reads the sides of the tokens from the signs of the advantages."""
        return cls(inputs=inputs, is_chosen_T=(inputs.advantages_T > 0).to(inputs.logprobs_T.dtype))

    def sums(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ([N] sums over the chosen tokens, [N] sums over the rejected tokens)."""
        return self._by_pair(values_T * self.is_chosen_T), self._by_pair(values_T * (1 - self.is_chosen_T))

    def means(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ([N] means over the chosen tokens, [N] means over the rejected tokens)."""
        chosen_N, rejected_N = self.sums(values_T)
        num_chosen_N, num_rejected_N = self.sums(self.is_chosen_T.new_ones(self.is_chosen_T.shape))
        return chosen_N / num_chosen_N.clamp(min=1), rejected_N / num_rejected_N.clamp(min=1)

    def baselines(self) -> Tensor:
        """Returns the [N] baselines of the pairs; 0 if the rows have none."""
        baseline_T = self.inputs.baseline_T
        if baseline_T is None:
            return self.is_chosen_T.new_zeros(self.inputs.num_samples)
        return self._by_pair(baseline_T) / self._by_pair(self.is_chosen_T.new_ones(self.is_chosen_T.shape))

    def share(self, values_N: Tensor) -> Tensor:
        """Returns [T] that adds up to the value of each pair: every token has an equal share of it."""
        num_tokens_N = self._by_pair(self.is_chosen_T.new_ones(self.is_chosen_T.shape))
        return (values_N / num_tokens_N.clamp(min=1)).index_select(0, self.inputs.sample_T)

    def _by_pair(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(self.inputs.num_samples).index_add(0, self.inputs.sample_T, values_T)


def log_sigmoid(values_N: Tensor) -> Tensor:
    """Computes log sigmoid, exact for large values of either sign."""
    return -values_N.new_zeros(values_N.shape).logaddexp(-values_N)
