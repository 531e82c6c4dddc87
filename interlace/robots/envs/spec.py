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
from interlace.robots.envs.camera_change import CameraChange
from interlace.rollouts.envs.spec import Observation

VIEW = "@"
"""Sign between a task and the name of a changed camera."""


class EnvSettings(Config):
    """Settings that all families have; a family adds its settings in a subclass."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of the family's tasks; a task's id is its index in this list."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Task -> instruction that replaces the family's, of environments that a program opens. A recipe has the texts in
    task.starts.instructions."""
    horizon: int = Field(default=200, ge=1)
    """Actions of an episode, after which it is truncated."""
    action_repeat: int = Field(default=1, ge=1)
    """Simulator steps for which each action is held."""
    cameras: dict[str, CameraChange] = Field(default_factory=dict)
    """Changes of the camera by name, for evaluation. `TASK@NAME` among the tasks is the task TASK, seen by the camera
    that the change NAME moves."""
    end_on_success: bool = True
    """True if success terminates the episode. Otherwise it continues to its horizon, and any success counts."""

    @model_validator(mode="after")
    def _refuse_repeated_tasks(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(
                f"tasks = {list(self.tasks)} names a task twice; a task's id is its place, so name it once"
            )
        changes = [task.partition(VIEW)[2] for task in self.tasks if VIEW in task]
        if unknown := sorted(set(changes) - set(self.cameras)):
            raise ValueError(
                f"tasks names the changed camera {unknown[0]!r}, and cameras has {sorted(self.cameras)}: add "
                f"cameras.{unknown[0]}, such as {{shift: [0.1, 0, 0]}}"
            )
        if empty := [name for name, change in self.cameras.items() if not change.has_effect]:
            raise ValueError(f"cameras.{empty[0]} moves nothing: give shift, in metres, or turn, in degrees")
        if unused := sorted(set(self.cameras) - set(changes)):
            raise ValueError(
                f"cameras.{unused[0]} has no effect: no task is seen by it. Add TASK{VIEW}{unused[0]} to tasks"
            )
        if unknown := sorted(set(self.instructions) - set(self.tasks)):
            raise ValueError(f"instructions names {unknown[0]!r}, which is none of tasks = {list(self.tasks)}")
        return self

    @property
    def rewards_chunks(self) -> bool:
        """True if the reward of a chunk is the reward of its last action, instead of the sum over its actions."""
        return False

    def split_task(self, task: str) -> tuple[str, CameraChange | None]:
        """Returns the simulator's name of a task, and the change of its camera; None for none."""
        name, has_change, change = task.partition(VIEW)
        return name, self.cameras[change] if has_change else None


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
    reset."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[n] True if the episode is over."""
        return np.asarray(np.any(self.terminated | self.truncated, axis=1))


def stack_observations(observations: list[Observation]) -> Observation:
    """Stacks observations of single environments to [n, ...]."""
    return {name: np.stack([one[name] for one in observations]) for name in observations[0]} if observations else {}


def select_row(observation: Observation, row: int) -> Observation:
    """Returns the observation of one environment."""
    return {name: array[row] for name, array in observation.items()}
