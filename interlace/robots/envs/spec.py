"""Shapes of an environment's inputs and outputs, and the settings common to all families. Works without torch.

Shapes: N = environments of one family, n = environments of a call, K = actions of a chunk, A = numbers of one action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import EpisodeLostError, UserError
from interlace.core.types import FloatArray

Array: TypeAlias = NDArray[np.generic]
Observation: TypeAlias = Mapping[str, Array]
"""Named arrays: `state` is [D] float32, an image is [H, W, 3] uint8 and upright; [n, ...] for n environments."""


class SimulatorError(EpisodeLostError):
    """A simulator failed during an episode: it raised an error, returned NaN, hung, or its process died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """Shape of one array of an observation, without [n]."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the numpy type: `float32`, `uint8`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionSpec:
    """Shape of an action: A numbers between bounds, or one choice among several."""

    low: FloatArray
    """[A] smallest values; smaller actions are clipped."""
    high: FloatArray
    """[A] largest values; larger actions are clipped."""
    num_choices: int | None = None
    """Number of choices, if an action is one integer from 0, [1]; None for continuous actions."""

    @property
    def size(self) -> int:
        """Size A of an action."""
        return len(self.low)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvSpec:
    """Properties of a family's environments that a policy must know."""

    observation: Mapping[str, ArraySpec]
    action: ActionSpec
    tasks: tuple[str, ...]
    """Names of the tasks; a task's id is its index."""
    instructions: tuple[str, ...]
    """One instruction per task; empty if neither the family nor the settings define one."""
    horizon: int
    """Largest number of actions per episode; the episode is then truncated."""

    def check_chunk(self, num_actions: int) -> None:
        """Raises UserError if a chunk of `num_actions` is longer than an episode."""
        if not 1 <= num_actions <= self.horizon:
            raise UserError(
                f"a chunk has {num_actions} actions, and an episode at most {self.horizon} (env.horizon); "
                "make the chunk shorter or the horizon longer"
            )


class EnvSettings(Config):
    """Settings that all families have; a family adds its settings in a subclass."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of the family's tasks; a task's id is its index in this list."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Task -> instruction that replaces the family's."""
    horizon: int = Field(default=200, ge=1)
    """Actions of an episode, after which it is truncated."""
    action_repeat: int = Field(default=1, ge=1)
    """Simulator steps for which each action is held."""
    end_on_success: bool = True
    """True if success terminates the episode. Otherwise it continues to its horizon, and any success counts."""

    @model_validator(mode="after")
    def _tasks_are_named_once(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(
                f"tasks = {list(self.tasks)} names a task twice; a task's id is its place, so name it once"
            )
        if unknown := sorted(set(self.instructions) - set(self.tasks)):
            raise ValueError(f"instructions names {unknown[0]!r}, which is none of tasks = {list(self.tasks)}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkResult:
    """Result of one chunk, with a row for each of the call's n environments.

    An environment stops at the action that ends its episode, and must be reset explicitly.
    """

    observation: Observation
    """[n, ...] after the last valid action: the final observation if the episode ended."""
    reward: FloatArray
    """[n, K] rewards, 0 for an invalid action."""
    terminated: NDArray[np.bool_]
    """[n, K] True at the action with which the task ended the episode: no bootstrap."""
    truncated: NDArray[np.bool_]
    """[n, K] True at the action with which the horizon ended the episode: bootstrap from `observation`."""
    valid: NDArray[np.bool_]
    """[n, K] True on executed actions, which come first."""
    success: NDArray[np.bool_]
    """[n] True if the task has been solved since the reset."""
    failures: Mapping[int, str]
    """Row -> reason why its simulator failed. Such a row's other values are undefined, and its environment needs a
    reset.
    """

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[n] True if the episode is over."""
        return np.asarray(np.any(self.terminated | self.truncated, axis=1))


def stacked(observations: list[Observation]) -> Observation:
    """Stacks observations of single environments to [n, ...]."""
    return {name: np.stack([one[name] for one in observations]) for name in observations[0]} if observations else {}
