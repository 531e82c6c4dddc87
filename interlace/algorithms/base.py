"""Base class of algorithms: an advantage estimator, a policy loss and declared needs, as pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs, UpdateConfig
from interlace.core.types import FloatArray, Sample, SampleGroup
from interlace.observe.headline import REWARD, Headline

RowKind: TypeAlias = Literal["demonstrations", "pairs"]
"""Kind of given rows: completions to imitate, or pairs of a chosen and a rejected completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Stages that an algorithm needs in the flow; samples pass through the other stages unchanged."""

    reference: bool = False
    teacher: bool = False
    """The log-probs of the reference role are what the loss learns from, so `reference` must name a teacher."""
    teacher_top: int = 0
    """Number of the teacher's most probable tokens at each place whose log-probs the loss needs."""
    reward: bool = True
    """Samples have a reward; without this need a recipe may leave `reward` out."""
    critic: bool = False
    process_reward: bool = False
    greedy_baseline: bool = False
    proximal_logprobs: bool = False
    """The policy's log-probs of the whole batch are computed before its first update (decoupled PPO)."""
    on_policy: bool = True
    """The actor trains on the samples of each step. If False, the samples only enter the replay, from which the
    algorithm trains."""
    transitions: bool = False
    """The actor trains on single turns of episodes, by an engine with critics."""
    demonstrations: bool = False
    """The actor trains on demonstrations alone, which the replay's learner draws."""
    batch_statistics: bool = False
    """Advantages depend on the whole batch, so training cannot start before it is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Advantages of one group: one array per sample in the group's order, [L] each."""

    advantages: Sequence[FloatArray]
    returns: Sequence[FloatArray] | None = None
    """Targets of the critic, if the algorithm has one."""


class AlgorithmConfig(UpdateConfig):
    """Settings of every algorithm."""

    refill_rounds: int = Field(default=10, ge=0)
    """Dropped groups are replaced until the batch is full. A step draws at most this many times prompts_per_step
    replacements; after that, the batch stays short. With 0, no group is replaced."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.aggregation_length is not None and self.aggregation != "constant":
            raise ValueError(
                f"aggregation_length = {self.aggregation_length} is of aggregation 'constant' and has no effect with "
                f"{self.aggregation!r}: set aggregation=constant, or leave it out"
            )
        if self.skip_rest_of_step and self.skip_minibatch_ratio is None and self.skip_minibatch_kl is None:
            raise ValueError(
                "skip_rest_of_step follows a dropped minibatch, and no limit drops one: set skip_minibatch_ratio or "
                "skip_minibatch_kl, or leave it out"
            )
        return self


class Algorithm(ABC):
    """Base class, with one subclass per file; the class attribute `Settings` is the subclass's config."""

    Settings: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    rows: ClassVar[RowKind | None] = None
    """Rows that it trains on, without samples of a policy; None for an algorithm that trains on samples."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @property
    def is_group_relative(self) -> bool:
        """Returns True if a single sample has no advantage, so that samples_per_prompt must be 2 or more."""
        return False

    @property
    def min_reward(self) -> float | None:
        """Returns the lowest reward that the advantages are defined for. If None, any reward."""
        return None

    @property
    def headline(self) -> Headline:
        """Returns the metric that the progress of a run shows first."""
        return REWARD

    @property
    def selects(self) -> bool:
        """Returns True if keeps() may drop a group; if False, keeps() need not be called."""
        return type(self).keeps is not Algorithm.keeps

    def keeps(self, group: SampleGroup) -> bool:
        """Returns True if a scored group is worth training on; other groups end as `filtered` and are replaced."""
        del group
        return True

    @abstractmethod
    def advantages(self, group: SampleGroup) -> Advantages: ...

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """Computes the advantages from the whole batch, [L] each.

        Called when the batch is closed, if `needs.batch_statistics` is set.
        samples: all samples of the batch, with the advantages of their groups. Raises ValueError if one is missing.
        """
        return advantages_of(samples)

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs: ...


def rewards_of(group: SampleGroup) -> FloatArray:
    """Returns [samples] rewards of a scored group. Raises ValueError if one is missing."""
    rewards = [sample.reward for sample in group.samples]
    missing = [sample.key for sample in group.samples if sample.reward is None]
    if missing:
        raise ValueError(f"samples {missing} of group {group.gid} have no reward")
    return np.array(rewards, np.float32)


def advantages_of(samples: Sequence[Sample]) -> list[FloatArray]:
    """Returns the advantages, [L] of each sample. Raises ValueError if one is missing."""
    missing = [sample.key for sample in samples if sample.advantages is None]
    if missing:
        raise ValueError(f"samples {missing} have no advantages")
    return [sample.advantages for sample in samples if sample.advantages is not None]


def check_advantages(result: object, group: SampleGroup, needs: Needs) -> None:
    """Raises UserError if the type or the shape of the advantages is not the one that training reads."""
    if not isinstance(result, Advantages):
        raise UserError(f"the algorithm's advantages() returned a {type(result).__name__}, not Advantages.")
    check_shapes("advantages", "advantages", result.advantages, group.samples)
    if result.returns is not None:
        check_shapes("advantages", "returns", result.returns, group.samples)
    elif needs.critic:
        raise UserError(
            "the algorithm's advantages() returned no returns, which its critic is trained towards. Return "
            "Advantages(advantages=..., returns=...), or need no critic."
        )


def check_shapes(method: str, what: str, arrays: object, samples: Sequence[Sample]) -> None:
    """Raises UserError unless `arrays` has one array per sample, with one number per token."""
    lengths = [sample.num_tokens for sample in samples]
    if (shapes := _list_shapes(arrays)) != [(length,) for length in lengths]:
        raise UserError(
            f"the algorithm's {method}() returned {what} of shapes {shapes} for {len(lengths)} samples whose responses "
            f"have {lengths} tokens. Return one array per sample, with one number per token."
        )


def _list_shapes(arrays: object) -> object:
    if not isinstance(arrays, Sequence | np.ndarray):
        return type(arrays).__name__
    return [getattr(array, "shape", type(array).__name__) for array in arrays]
