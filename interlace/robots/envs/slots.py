"""Environments of a vector, and the checks of its calls: shared by vectors of simulators and by batch simulators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import TaskSimulator
from interlace.robots.envs.spec import ChunkResult, EnvSettings
from interlace.rollouts.envs.jobs import Start
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation, SimulatorError


@dataclass(slots=True, kw_only=True)
class EnvSlot:
    """One environment."""

    start: Start
    observation: Observation
    state: Any = None
    """State of the environment when its simulator last switched to another one."""
    num_actions: int = 0
    is_over: bool = False
    success: bool = False
    broken: str = ""
    """Reason why its simulator failed; empty while it works."""


def make_spec(simulators: Sequence[TaskSimulator], settings: EnvSettings) -> EnvSpec:
    """Returns the spec of environments of several tasks, one simulator each. Raises UserError if shapes differ."""
    first = simulators[0]
    for other in simulators[1:]:
        if other.observation_spec != first.observation_spec or not _have_equal_actions(other, first):
            raise UserError(
                f"tasks {first.task!r} and {other.task!r} differ in the shape of observations or actions; "
                "one policy serves tasks that are alike in both"
            )
    return EnvSpec(
        observation=first.observation_spec,
        action=first.action_spec,
        tasks=settings.tasks,
        instructions=tuple(settings.instructions.get(one.task, one.instruction) for one in simulators),
        horizon=settings.horizon,
    )


def check_actions(actions: Array, num: int, size: int) -> Array:
    """Returns actions as an array [num, K, size]. Raises UserError if they have another shape."""
    given = np.asarray(actions)
    if given.ndim != 3 or len(given) != num or given.shape[2] != size:
        raise UserError(
            f"actions of shape {given.shape} for {num} environments: it must be [n, K, A] with n = {num} and A = {size}"
        )
    return given


def choose_slots(slots: Sequence[int] | None, num_envs: int) -> Sequence[int]:
    """Returns the environments of a call; see VectorEnv."""
    return range(num_envs) if slots is None else [int(slot) for slot in slots]


def make_empty_result(num: int, num_actions: int) -> ChunkResult:
    """Returns a result of `num` environments without a valid action."""
    shape = (num, num_actions)
    return ChunkResult(
        observation={},
        reward=np.zeros(shape, np.float32),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.zeros(shape, np.bool_),
        valid=np.zeros(shape, np.bool_),
        success=np.zeros(num, np.bool_),
        failures={},
    )


def check_task_id(task: int, settings: EnvSettings) -> None:
    """Raises UserError if the settings have no task of this id."""
    if not 0 <= task < len(settings.tasks):
        raise UserError(f"task id {task}: there are {len(settings.tasks)} tasks, from 0")


def make_offload_error() -> UserError:
    """Returns the error of a call between offload() and onload()."""
    return UserError("the environments are offloaded: onload() comes before the next call")


def make_reset_error(slot: int) -> UserError:
    """Returns the error of a chunk in an environment that has no episode."""
    return UserError(f"environment {slot} was not reset before its first chunk")


def _have_equal_actions(one: TaskSimulator, other: TaskSimulator) -> bool:
    mine, its = one.action_spec, other.action_spec
    return (
        mine.num_choices == its.num_choices
        and np.array_equal(mine.low, its.low)
        and np.array_equal(mine.high, its.high)
    )


def reset_checked(task: str, reset: Callable[[], Observation]) -> Observation:
    """Returns the first observations that a reset gives. Raises SimulatorError if it fails. task: for messages."""
    try:
        observation = reset()
    except UserError:
        raise
    except Exception as error:
        raise SimulatorError(f"the reset of {task!r} raised {describe_error(error)}") from error
    if reason := find_invalid_array(observation):
        raise SimulatorError(f"the reset of {task!r} gave {reason}")
    return observation


def find_invalid_array(observation: Observation) -> str:
    """Returns a description of an array that is not finite; empty if all are finite."""
    for name, array in observation.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return f"an observation {name!r} with NaN or infinity"
    return ""


def find_invalid_result(observation: Observation, rewards: FloatArray) -> str:
    """Returns why a chunk's result is invalid: it has a number that is not finite; empty if all are finite."""
    reason = find_invalid_array(observation) or ("" if np.isfinite(rewards).all() else "a reward that is NaN")
    return f"it gave {reason}" if reason else ""


def describe_error(error: BaseException) -> str:
    """Returns an error's type and message."""
    return f"{type(error).__name__}: {error}"
