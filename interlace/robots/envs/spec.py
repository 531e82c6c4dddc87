"""Shapes of an environment's inputs and outputs, and the settings that every family has. Runs without torch.

Shapes: N = environments of one family side by side, n = environments of a call, K = actions of a chunk,
A = numbers of one action.
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
"""Named arrays: `state` is [D] float32, an image [H, W, 3] uint8, upright; [n, ...] for n environments."""


class SimulatorError(EpisodeLostError):
    """A simulator failed in the middle of an episode: it raised, gave NaN, hung, or its process died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """Shape of one array of an observation, without [n]."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name: `float32`, `uint8`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionSpec:
    """Shape of an action: A numbers between bounds, or one choice among several."""

    low: FloatArray
    """[A] smallest values; actions below are clipped."""
    high: FloatArray
    """[A]."""
    num_choices: int | None = None
    """Number of choices, of which an action is one as a whole number from 0, [1]; None: continuous."""

    @property
    def size(self) -> int:
        """Returns A."""
        return len(self.low)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvSpec:
    """Facts that a policy must know of a family's environments."""

    observation: Mapping[str, ArraySpec]
    action: ActionSpec
    tasks: tuple[str, ...]
    """Names; a task's id is its place."""
    instructions: tuple[str, ...]
    """One a task; empty if neither the family nor the settings give one."""
    horizon: int
    """Actions of an episode; an episode that has not ended is truncated with the last one."""

    def check_chunk(self, num_actions: int) -> None:
        """Raises UserError if a chunk of `num_actions` is longer than an episode."""
        if not 1 <= num_actions <= self.horizon:
            raise UserError(
                f"a chunk has {num_actions} actions, and an episode at most {self.horizon} (env.horizon); "
                "make the chunk shorter or the horizon longer"
            )


class EnvSettings(Config):
    """Settings that every family has; a family adds its own by a subclass."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of the family's tasks; a task's id is its place here."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """By task: the instruction, in place of the family's."""
    horizon: int = Field(default=200, ge=1)
    """Actions of an episode, after which it is truncated."""
    action_repeat: int = Field(default=1, ge=1)
    """Steps of the simulator that each action is held for."""
    end_on_success: bool = True
    """A success terminates the episode. Otherwise the episode lasts to its horizon, and a success in it counts."""

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
    """Result of one chunk, a row for each of the n environments that it was about.

    An environment stops at the action that ends its episode and is not reset by itself.
    """

    observation: Observation
    """[n, ...] after the last action that counted: the final observation if the episode ended."""
    reward: FloatArray
    """[n, K], 0 for an action that did not count."""
    terminated: NDArray[np.bool_]
    """[n, K] True at the action with which the task itself ended the episode: no bootstrap."""
    truncated: NDArray[np.bool_]
    """[n, K] True at the action with which the horizon ended it: bootstrap from `observation`."""
    valid: NDArray[np.bool_]
    """[n, K] True on actions that were carried out, which all come first."""
    success: NDArray[np.bool_]
    """[n] whether the task was solved since the reset."""
    failures: Mapping[int, str]
    """By row: why a simulator broke. The other values of such a row have no meaning, and it waits for a reset."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[n] whether the episode is over."""
        return np.asarray(np.any(self.terminated | self.truncated, axis=1))


def stacked(observations: list[Observation]) -> Observation:
    """Stacks observations of single environments, [n, ...]."""
    return {name: np.stack([one[name] for one in observations]) for name in observations[0]} if observations else {}
