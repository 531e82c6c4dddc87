"""Base of algorithms that train from the replay alone, on single turns of a robot's episodes.

A subclass is a file with settings and losses; its engine in `interlace/engines/train/` makes the updates.
Shapes: B = transitions of an update, N = critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.training import LossInputs, LossOutputs
    from interlace.core.types import SampleGroup


class ReplayedSettings(AlgorithmConfig):
    """Settings of every algorithm that trains from the replay. The policy's optimizer is the recipe's `optimizer`."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount from each turn of an episode to the next."""
    n_step: int = Field(default=1, ge=1)
    """Turns whose rewards a target sums before it takes a value."""
    turns_per_update: int = Field(default=256, ge=1)
    """Transitions of an update."""
    updates_per_turn: float = Field(default=1.0, gt=0)
    """Updates for each turn that was added to the replay. A fraction of an update at a step's end is the probability of
    one more."""
    start_turns: int = Field(default=256, ge=1)
    """Turns in the replay before the first update."""
    offline_updates: int = Field(default=0, ge=0)
    """Updates from `replay.demonstrations` alone, before the first step."""
    critic_width: int = Field(default=256, ge=1)
    """Width of the critics' hidden layers."""
    critic_layers: int = Field(default=2, ge=1)
    """Hidden layers of each critic."""
    layer_norm: bool = False
    """True to normalise each hidden layer of the critics, as in RLPD."""
    critic_lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the critics (Adam)."""


class CriticSettings(ReplayedSettings):
    """Settings of algorithms with critics of actions and their target copies."""

    tau: float = Field(default=0.005, gt=0, le=1)
    """Share by which the target critics move to the critics in each update."""
    num_critics: int = Field(default=2, ge=1)
    """Critics that are trained."""


class WeightedSettings(ReplayedSettings):
    """Settings of algorithms that imitate recorded actions by weight."""

    max_weight: float = Field(default=100.0, gt=0)
    """Largest weight of an action."""


class ReplayedAlgorithm(Algorithm):
    """Trains from the replay alone: the samples of a step only enter the replay."""

    Settings = ReplayedSettings
    settings: ReplayedSettings
    has_priorities: ClassVar[bool] = False
    """True if its engine returns the error of each transition, so that transitions can be drawn by it."""
    engine: ClassVar[str]
    """Class of the train engine, as package.module:Class, a subclass of TransitionEngine."""
    heads: ClassVar[tuple[str, ...]] = ("squashed", "gaussian")
    """Heads of the policies that it trains."""

    @property
    def needs(self) -> Needs:
        return Needs(on_policy=False, transitions=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Returns zeros, which nothing reads."""
        return Advantages(advantages=[np.zeros(sample.num_tokens, np.float32) for sample in group.samples])

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Raises ValueError: the losses are of transitions."""
        del inputs
        raise ValueError(f"{type(self).__name__} has no loss per token: its losses are of transitions")

    @staticmethod
    def critic_loss(values_NB: Tensor, targets_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
        """Computes half of the mean squared error, summed over the critics. weights_B: of the squared errors."""
        squares_NB = (values_NB - targets_B) ** 2
        return 0.5 * (squares_NB if weights_B is None else weights_B * squares_NB).mean(1).sum()

    @staticmethod
    def imitation_loss(logprobs_B: Tensor, weights_B: Tensor) -> Tensor:
        """Computes minus the mean of weighted log-probs of recorded actions. weights_B: without gradient."""
        return -(weights_B * logprobs_B).mean()
