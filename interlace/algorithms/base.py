"""What an algorithm is: an advantage estimator, a policy loss and declared needs. Pure functions on typed inputs.

Shapes: T = response tokens of one packed micro-batch that carry loss, samples one after another; N = samples in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from interlace.core.config import Config
from interlace.core.types import FloatArray, SampleGroup

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
"""token_mean: sum / tokens of the global minibatch (DAPO). seq_mean_token_mean: mean over sequences of their token means (GRPO).
seq_mean_token_sum: mean over sequences of token sums. constant: sum / (sequences x a constant length) (Dr. GRPO)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What an algorithm asks of the flow; a stage that nobody needs passes samples through."""

    reference: bool = False
    critic: bool = False
    process_reward: bool = False
    greedy_baseline: bool = False
    batch_statistics: bool = False
    """Advantages depend on the whole batch, so training cannot start before it is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Of one group, one array a sample in the group's order, each [L]."""

    advantages: Sequence[FloatArray]
    returns: Sequence[FloatArray] | None = None
    """Targets of the critic, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch."""

    logprobs_T: Tensor
    """[T] of the policy being trained, with gradient, at the sampling temperature."""
    entropy_T: Tensor
    """[T] entropy of the policy; carries gradient only where the algorithm has an entropy bonus."""
    behaviour_logprobs_T: Tensor
    """[T] under which the tokens were sampled."""
    proximal_logprobs_T: Tensor
    """[T] of the policy at the start of the step; equal to the behaviour ones unless recomputed."""
    advantages_T: Tensor
    ref_logprobs_T: Tensor | None
    sample_T: Tensor
    """[T] int, 0 ... N-1: which sample a token belongs to."""
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """Per token, unreduced: the train engine applies the aggregation with denominators of the global minibatch."""

    loss_T: Tensor
    """[T]."""
    metrics_T: Mapping[str, Tensor]
    """Name -> [T]; reported as the mean over the tokens of the step."""


class AlgorithmConfig(Config):
    """Settings every algorithm has."""

    aggregation: Aggregation = "token_mean"
    aggregation_length: int | None = None
    """The constant of `constant`; None takes max_new_tokens."""
    skip_minibatch_ratio: float | None = None
    """Minibatch early stop: where the minibatch's mean importance ratio is outside [1/x, x] it is dropped and counted."""


class Algorithm(ABC):
    """Subclassed in one file each; the class attribute `Settings` is its config."""

    Settings: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(self, settings: AlgorithmConfig) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @property
    def is_group_relative(self) -> bool:
        """True where one sample alone has no advantage: samples_per_prompt must then be 2 or more."""
        return False

    def keeps(self, group: SampleGroup) -> bool:
        """Whether a scored group is worth training on; one that is not ends as `filtered` and is replaced."""
        del group
        return True

    @abstractmethod
    def advantages(self, group: SampleGroup) -> Advantages: ...

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs: ...


def rewards_of(group: SampleGroup) -> FloatArray:
    """[samples] rewards of a scored group. Raises ValueError where one is missing."""
    rewards = [sample.reward for sample in group.samples]
    missing = [sample.key for sample in group.samples if sample.reward is None]
    if missing:
        raise ValueError(f"samples {missing} of group {group.gid} have no reward")
    return np.array(rewards, np.float32)
