"""Interface of simulators that step a batch of environments in one call, with tensors on a device.

Shapes: B = environments of a simulator, A = numbers of one action.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from interlace.core.errors import UserError
from interlace.robots.envs.base import EnvSettings, TaskSimulator
from interlace.rollouts.envs.spec import Array, Start

DeviceArray: TypeAlias = Any
"""Tensor of the simulator's library on its device: a torch tensor or a JAX array."""
F = TypeVar("F", bound=Callable[..., object])


class BatchSettings(EnvSettings):
    """Settings that all batch simulators have."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device that simulates; cuda is the first GPU of the simulating process. Place the role `env` on devices then."""
    frame_stack: int = Field(default=1, ge=1)
    """Number of observations in an observation: after each of the last actions, the current one last. The first
    observation of an episode counts as its own past."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchStep:
    """Result of one simulator step, [B] each, on the device. Rows of environments that took no part are not read."""

    reward: DeviceArray
    terminated: DeviceArray
    """True if the task ended the episode, other than by success."""
    truncated: DeviceArray
    """True if a limit inside the simulator ended the episode."""
    success: DeviceArray


class BatchSimulator(TaskSimulator):
    """Environments of one task, numbered 0 to B - 1, which are stepped in one call.

    mask: [B] booleans on the device. The environments outside of it must not change.
    """

    Settings: ClassVar[type[EnvSettings]] = BatchSettings
    settings: BatchSettings
    xp: ModuleType
    """Library of the tensors: torch or jax.numpy. Its `where`, `concatenate` and `stack` are called."""

    def __init__(self, settings: Any, task: str, num_envs: int) -> None:
        """Raises UserError for an unknown task, a missing library or an absent device."""
        super().__init__(settings, task)
        self.num_envs = num_envs

    @abstractmethod
    def to_device(self, array: Array) -> DeviceArray:
        """Copies an array to the device."""

    @abstractmethod
    def to_host(self, array: DeviceArray) -> Array:
        """Returns a tensor as a numpy array, which may share its memory."""

    def compile(self, function: F) -> F:
        """Returns a function of tensors that computes the same, faster if the library compiles."""
        return function

    @abstractmethod
    def reset(self, mask: DeviceArray, starts: Mapping[int, Start]) -> None:
        """Starts an episode in each environment of the mask. starts: its start, by number; see Start.

        A start gives the same state for any number and any other environments.
        """

    @abstractmethod
    def step(self, actions: DeviceArray, mask: DeviceArray) -> BatchStep:
        """Executes an action in each environment of the mask. actions: [B, A] within their bounds."""

    @abstractmethod
    def observe(self, mask: DeviceArray) -> Mapping[str, DeviceArray]:
        """Returns the current observations, [B, ...], in tensors that later steps do not change.

        Called once per chunk, or after each action if observations are stacked. Rows outside the mask are not read.
        """

    def find_failures(self, rows: Sequence[int]) -> Mapping[int, str]:  # noqa: ARG002 - most simulators report none
        """Returns environments, of `rows`, whose state is wrong since their reset, with the reasons."""
        return {}

    def save(self, rows: Sequence[int]) -> list[object]:
        """Returns whole states, which can be pickled. Raises UserError if they cannot be saved exactly."""
        raise UserError(
            f"{type(self).__name__} cannot save the states of {len(rows)} environments. Keep its simulators on the "
            "host or on devices of their own (schedule.placement.env), where no state is saved."
        )

    def load(self, states: Mapping[int, object]) -> None:
        """Restores states by the number of the environment. They may come from another process."""
        raise UserError(f"{type(self).__name__} cannot restore the states of {len(states)} environments.")

    def render(self, row: int) -> NDArray[np.uint8]:
        """Draws the current state of an environment, [H, W, 3]. Raises UserError without a renderer."""
        raise UserError(f"environment {row} cannot be drawn: {type(self).__name__} draws no pictures")

    def expert_actions(self, row: int, count: int) -> Array:
        """Returns a scripted expert's next actions in an environment, [count, A], without changing its state.

        Raises UserError if the task has no expert.
        """
        raise UserError(
            f"{type(self).__name__} has no scripted expert for task {self.task!r}, so environment {row} has none of "
            f"the {count} actions"
        )
