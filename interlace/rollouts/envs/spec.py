"""Shapes of an environment's inputs and outputs.

Shapes: K = actions of a chunk, A = numbers of one action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
