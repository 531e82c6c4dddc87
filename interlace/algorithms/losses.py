"""Policy losses per token, unreduced. T = trained tokens of a micro-batch; r = current over proximal probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from interlace.core.training import MAX_LOG_RATIO, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "k3+"]
"""Estimators of KL(policy, reference) from sampled tokens, with d = log reference - log policy. k1: -d. k2: d^2 / 2.
k3: e^d - d - 1. k3+: the value of k3 with the gradient of k2, which is the unbiased gradient for a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """A policy loss before corrections, KL and entropy."""

    loss_T: Tensor
    clipped_T: Tensor
    """[T] bool: tokens whose gradient the clip removes or bounds."""


def importance_ratio(logprobs_T: Tensor, proximal_T: Tensor) -> Tensor:
    """Computes [T] r, with gradient."""
    return (logprobs_T - proximal_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def turn_ratio(inputs: LossInputs, proximal_T: Tensor) -> Tensor:
    """Computes [T] the ratio of each token's turn, with gradient, for turns that are one action, as a robot's chunk.

    Raises ValueError if the inputs lack the turns.
    """
    if inputs.turn_T is None:
        raise ValueError("ratio_of=turn needs the turn of each token, and the inputs have no turn_T")
    gap_T = (inputs.logprobs_T - proximal_T) * inputs.mask_T.to(proximal_T.dtype)
    sums = gap_T.new_zeros(int(inputs.turn_T.max()) + 1).index_add(0, inputs.turn_T, gap_T)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().index_select(0, inputs.turn_T)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """Computes PPO's loss (arXiv 1707.06347, eq. 7) with separate lower and upper bounds (DAPO, arXiv 2503.14476).

    dual_clip: c > 1 bounds the loss of a token with negative advantage at -c A (arXiv 1912.09729, eq. 5).
    """
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = (-ratio_T * advantages_T).maximum(-bounded_T * advantages_T)
    detached_T = ratio_T.detach()
    clipped_T = ((detached_T > 1 + clip_high) & (advantages_T > 0)) | ((detached_T < 1 - clip_low) & (advantages_T < 0))
    if dual_clip is not None:
        bound_T = -dual_clip * advantages_T
        negative_T = advantages_T < 0
        clipped_T = clipped_T | (negative_T & (loss_T.detach() > bound_T))
        loss_T = loss_T.minimum(bound_T).where(negative_T, loss_T)
    return Surrogate(loss_T=loss_T, clipped_T=clipped_T)


def kl_divergence(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Computes the [T] estimate of KL(policy, reference) (http://joschu.net/blog/kl-approx.html)."""
    gap_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -gap_T
        case "k2":
            return gap_T.square() / 2
        case "k3":
            return gap_T.exp() - gap_T - 1
        case "k3+":
            with_gradient_T = gap_T.square() / 2
            value_T = (gap_T.exp() - gap_T - 1).detach()
            return value_T + with_gradient_T - with_gradient_T.detach()


def sequence_mean(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """Computes the [N] mean over each sample's trained tokens; 0 for a sample without any."""
    return sequence_sum(values_T, inputs) / sequence_sum(values_T.new_ones(values_T.shape), inputs).clamp(min=1)


def sequence_sum(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """Computes the [N] sum over each sample's trained tokens."""
    weights_T = inputs.mask_T.to(values_T.dtype)
    return values_T.new_zeros(inputs.num_samples).index_add(0, inputs.sample_T, values_T * weights_T)
