"""Data between an algorithm's loss and a train engine. Tensors are named, torch is not imported.

Shapes: T = response tokens of one packed micro-batch, samples one after another; N = samples in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from interlace.core.config import Config

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
"""token_mean: sum / trained tokens of the global minibatch (DAPO). seq_mean_token_mean: mean over sequences of their
token means (GRPO). seq_mean_token_sum: mean over sequences of token sums. constant: sum / (sequences x a constant
length) (Dr. GRPO). Denominators are always those of the global minibatch."""


class UpdateConfig(Config):
    """How a minibatch's losses per token become one update, or none."""

    aggregation: Aggregation = "token_mean"
    aggregation_length: int | None = Field(default=None, ge=1)
    """The constant of `constant`, in tokens; None takes max_new_tokens."""
    skip_minibatch_ratio: float | None = Field(default=None, gt=1)
    """A minibatch whose mean importance ratio is outside [1/x, x] is dropped and counted."""
    skip_minibatch_kl: float | None = Field(default=None, gt=0)
    """So is one whose policy is further than this from the proximal one (where that is not recomputed, from the one
    that sampled), in nats a token."""
    skip_rest_of_step: bool = False
    """True drops a step's remaining minibatches together with one that is dropped as too far out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch."""

    logprobs_T: Tensor
    """[T] of the policy being trained, with gradient, under the distribution that was sampled from."""
    entropy_T: Tensor
    """[T] entropy of the policy in nats; carries gradient only where asked for."""
    behaviour_logprobs_T: Tensor
    """[T] under which the tokens were sampled."""
    proximal_logprobs_T: Tensor
    """[T] of the policy at the start of the step; the behaviour ones unless recomputed."""
    advantages_T: Tensor
    """[T]."""
    ref_logprobs_T: Tensor | None
    """[T] of the reference policy."""
    mask_T: Tensor
    """[T] bool: tokens to train (an episode's tool and user tokens are False)."""
    sample_T: Tensor
    """[T] int, 0 ... N-1: which sample a token belongs to."""
    num_samples: int
    turn_T: Tensor | None = None
    """[T] int, 0 ...: which turn a token belongs to, over all samples; None: not said."""
    baseline_T: Tensor | None = None
    """[T] number that a loss on pairs compares with, equal for all tokens of a pair; None if the rows have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """Per token and unreduced: the train engine applies mask and aggregation."""

    loss_T: Tensor
    """[T]."""
    metrics_T: Mapping[str, Tensor]
    """Name -> [T] detached; reported as the mean over a minibatch's trained tokens, of a step over its minibatches."""


LossFn: TypeAlias = Callable[[LossInputs], LossOutputs]

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here before exp, so that a far-out token gives a large number and not an infinite one."""
