"""Base of algorithms: an advantage estimator, a policy loss and declared needs. Pure functions on typed inputs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from interlace.core.training import LossInputs, LossOutputs, UpdateConfig
from interlace.core.types import FloatArray, Sample, SampleGroup

RowKind: TypeAlias = Literal["demonstrations", "pairs"]
"""Kind of given rows: completions to imitate, or pairs of a chosen and a rejected completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Demands of an algorithm on the flow; a stage that is not needed passes samples through."""

    reference: bool = False
    teacher: bool = False
    """The log-probs of the reference role are what the loss learns from, so `reference` must name a teacher."""
    reward: bool = True
    """Samples have a reward; without this need a recipe may leave `reward` out."""
    critic: bool = False
    process_reward: bool = False
    greedy_baseline: bool = False
    proximal_logprobs: bool = False
    """The policy's log-probs of the whole batch are computed before its first update (decoupled PPO)."""
    batch_statistics: bool = False
    """Advantages depend on the whole batch, so training cannot start before it is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Advantages of one group, one array a sample in the group's order, each [L]."""

    advantages: Sequence[FloatArray]
    returns: Sequence[FloatArray] | None = None
    """Targets of the critic, where there is one."""


class AlgorithmConfig(UpdateConfig):
    """Settings every algorithm has."""

    refill_rounds: int = Field(default=10, ge=0)
    """Groups that were dropped are replaced until the batch is full, at most this many times prompts_per_step a step;
    then the batch stays short. 0 replaces none."""


class Algorithm(ABC):
    """Subclassed in one file each; the class attribute `Settings` is its config."""

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
        """Says whether one sample alone has no advantage: samples_per_prompt must then be 2 or more."""
        return False

    @property
    def min_reward(self) -> float | None:
        """Returns the lowest reward that the advantages are defined for; None takes any."""
        return None

    @property
    def selects(self) -> bool:
        """Says whether keeps() may drop a group; where it may not, keeps() need not be asked."""
        return type(self).keeps is not Algorithm.keeps

    def keeps(self, group: SampleGroup) -> bool:
        """Says whether a scored group is worth training on; one that is not ends as `filtered` and is replaced."""
        del group
        return True

    @abstractmethod
    def advantages(self, group: SampleGroup) -> Advantages: ...

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """Computes the advantages in view of the whole batch, [L] each.

        Called once the batch is closed where `needs.batch_statistics`.
        samples: of all its groups, with the advantages of their group. Raises ValueError where one is missing.
        """
        return advantages_of(samples)

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs: ...


def rewards_of(group: SampleGroup) -> FloatArray:
    """Returns [samples] rewards of a scored group. Raises ValueError where one is missing."""
    rewards = [sample.reward for sample in group.samples]
    missing = [sample.key for sample in group.samples if sample.reward is None]
    if missing:
        raise ValueError(f"samples {missing} of group {group.gid} have no reward")
    return np.array(rewards, np.float32)


def advantages_of(samples: Sequence[Sample]) -> list[FloatArray]:
    """Returns the advantages, [L] of each sample. Raises ValueError where one is missing."""
    missing = [sample.key for sample in samples if sample.advantages is None]
    if missing:
        raise ValueError(f"samples {missing} have no advantages")
    return [sample.advantages for sample in samples if sample.advantages is not None]
