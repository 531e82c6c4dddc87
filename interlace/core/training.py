"""Data between the loss of an algorithm and a train engine. Tensor types are named without importing torch.

Shapes: T = response tokens of one packed micro-batch, sample after sample; N = samples in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
"""token_mean: sum / trained tokens (DAPO). seq_mean_token_mean: mean over sequences of their token means (GRPO).
seq_mean_token_sum: mean over sequences of their token sums. constant: sum / (sequences x a constant length) (Dr. GRPO).
All denominators count the global minibatch."""


class UpdateConfig(Config):
    """Reduction of the losses per token of a minibatch to one update, and conditions that drop the update."""

    aggregation: Aggregation = "token_mean"
    aggregation_length: int | None = Field(default=None, ge=1)
    """Constant length of the aggregation `constant`, in tokens. If None, max_new_tokens."""
    skip_minibatch_ratio: float | None = Field(default=None, gt=1)
    """A minibatch whose mean importance ratio is outside [1/x, x] is dropped and counted."""
    skip_minibatch_kl: float | None = Field(default=None, gt=0)
    """A minibatch is dropped and counted if the KL divergence of its policy from the proximal policy exceeds this, in
    nats per token. If proximal log-probs are not recomputed, the policy that sampled is used."""
    skip_rest_of_step: bool = False
    """Drop the remaining minibatches of a step together with one that is dropped by these limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch."""

    logprobs_T: Tensor
    """[T] log-probs of the trained policy with gradient, under the distribution that was sampled from."""
    entropy_T: Tensor
    """[T] entropy of the policy, in nats. It has a gradient only if the algorithm requests it."""
    behaviour_logprobs_T: Tensor
    """[T] log-probs under which the tokens were sampled."""
    proximal_logprobs_T: Tensor
    """[T] log-probs of the policy at the start of the step. Equal to the behaviour log-probs unless recomputed."""
    advantages_T: Tensor
    """[T] advantages."""
    ref_logprobs_T: Tensor | None
    """[T] log-probs of the reference policy."""
    mask_T: Tensor
    """[T] bool, True on tokens to train. Tool and user tokens of an episode are False."""
    sample_T: Tensor
    """[T] int, 0 ... N-1: index of the sample of each token."""
    num_samples: int
    turn_T: Tensor | None = None
    """[T] int, 0 ...: index of the turn of each token, counted over all samples. None if unknown."""
    teacher_top_TK: Tensor | None = None
    """[T, K] log-probs of a teacher's K most probable tokens. None if the algorithm does not request them."""
    policy_top_TK: Tensor | None = None
    """[T, K] log-probs of the trained policy at the same tokens, with gradient."""
    baseline_T: Tensor | None = None
    """[T] number that a loss on pairs compares with, equal for all tokens of a pair. None if the rows have none."""
    sources_N: Sequence[str] = ()
    """[N] name of each sample's source in a mixture, else empty text. Empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """Unreduced results per token. The train engine applies the mask and the aggregation."""

    loss_T: Tensor
    """[T] loss."""
    metrics_T: Mapping[str, Tensor]
    """[T] detached, by name. Reported as the mean over the trained tokens of a step."""
    sample_metrics_N: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] detached, by name: one number a sample. Reported as the mean over the samples of a step."""
    partial_metrics: Sequence[Mapping[str, Tensor]] = ()
    """Detached numbers of some of the tokens or samples, by name. Reported as the mean over all numbers of a name."""


LossFn: TypeAlias = Callable[[LossInputs], LossOutputs]

MAX_LOG_RATIO = 20.0
"""Bound to which log ratios are clamped before exp, so that the ratio of an unlikely token stays finite."""


def check_outputs(outputs: object, inputs: LossInputs) -> LossOutputs:
    """Returns the outputs. Raises UserError unless they have one number per token and carry a gradient."""
    shape, tensor = inputs.logprobs_T.shape, type(inputs.logprobs_T)
    if not isinstance(outputs, LossOutputs):
        raise UserError(f"the algorithm's loss() returned a {type(outputs).__name__}; it returns LossOutputs.")
    for name, values in {"loss_T": outputs.loss_T, **outputs.metrics_T}.items():
        if not isinstance(values, tensor) or values.shape != shape:
            found = f"shape {list(values.shape)}" if isinstance(values, tensor) else f"type {type(values).__name__}"
            raise UserError(
                f"the algorithm's loss() returned {name} of {found} for {shape[0]} tokens. It is one number a token, "
                f"shape [{shape[0]}]: masks, sums and means are the engine's."
            )
    for name, values in outputs.sample_metrics_N.items():
        if not isinstance(values, tensor) or values.shape != (inputs.num_samples,):
            raise UserError(
                f"the algorithm's loss() returned sample_metrics_N[{name!r}] that is not one number a sample: a tensor "
                f"of shape [{inputs.num_samples}]."
            )
    if not outputs.loss_T.requires_grad:
        raise UserError(
            "the algorithm's loss() returned a loss_T without a gradient: it does not depend on inputs.logprobs_T or "
            "inputs.entropy_T."
        )
    return outputs
