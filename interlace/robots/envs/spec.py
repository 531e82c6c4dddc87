"""Settings common to all families, and the result of a chunk in several environments. Works without torch.

Shapes: N = environments of one family, n = environments of a call, K = actions of a chunk, A = numbers of one action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.types import FloatArray
from interlace.rollouts.envs.spec import Observation


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


def stack_observations(observations: list[Observation]) -> Observation:
    """Stacks observations of single environments to [n, ...]."""
    return {name: np.stack([one[name] for one in observations]) for name in observations[0]} if observations else {}
