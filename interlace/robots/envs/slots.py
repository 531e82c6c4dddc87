"""Environments of a vector, and the checks of its calls: shared by vectors of simulators and by batch simulators."""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import ChunkResult, EnvSettings, TaskSimulator, VectorEnv, stack_observations
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation, SimulatorError, Start


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


class SlotEnvs(VectorEnv):
    """Vector of environments that are records in this process: the common part of its two kinds."""

    def __init__(self, settings: EnvSettings, num_envs: int) -> None:
        super().__init__(settings, num_envs)
        self._settings = settings
        self._slots: dict[int, EnvSlot] = {}
        """The environments that have been reset."""

    def reset(
        self,
        *,
        seeds: Sequence[int],
        task_ids: Sequence[int],
        init_state_ids: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> Observation:
        chosen, starts = self._choose_slots(slots), dict[int, Start]()
        for slot, seed, task, state in zip(chosen, seeds, task_ids, init_state_ids, strict=True):
            check_task_id(int(task), self._settings)
            starts[slot] = Start(task=int(task), init_state=int(state), seed=int(seed))
        self._reset_slots(starts)
        return self.observe(chosen)

    def get_state(self, slots: Sequence[int] | None = None) -> list[bytes]:
        """Returns whole states; see VectorEnv. Raises UserError if the simulator cannot save them."""
        chosen = self._choose_slots(slots)
        self._save(chosen)
        return [pickle.dumps(self._slots[slot], protocol=5) for slot in chosen]

    def set_state(self, states: Sequence[bytes], slots: Sequence[int] | None = None) -> None:
        chosen = self._choose_slots(slots)
        for slot, state in zip(chosen, states, strict=True):
            self._slots[slot] = pickle.loads(state)
        self._load(chosen)

    def chunk_step(self, actions: Array, slots: Sequence[int] | None = None) -> ChunkResult:
        chosen, size, given = self._choose_slots(slots), self.spec.action.size, np.asarray(actions)
        if given.ndim != 3 or len(given) != len(chosen) or given.shape[2] != size:
            raise UserError(
                f"actions of shape {given.shape} for {len(chosen)} environments: it must be [n, K, A] with "
                f"n = {len(chosen)} and A = {size}"
            )
        for slot in chosen:
            if slot not in self._slots:
                raise UserError(f"environment {slot} was not reset before its first chunk")
        result = make_empty_result(*given.shape[:2])
        self._step_slots(chosen, given, result)
        for place, slot in enumerate(chosen):
            result.success[place] = self._slots[slot].success
        failures = {place: broken for place, slot in enumerate(chosen) if (broken := self._slots[slot].broken)}
        return replace(result, observation=self.observe(chosen), failures=failures)

    def observe(self, slots: Sequence[int] | None = None) -> Observation:
        """Returns the observations after each environment's last call."""
        return stack_observations([self._slots[slot].observation for slot in self._choose_slots(slots)])

    @abstractmethod
    def _reset_slots(self, starts: Mapping[int, Start]) -> None:
        """Begins episodes, and replaces the slots of their environments. starts: by slot."""

    @abstractmethod
    def _save(self, slots: Sequence[int]) -> None:
        """Stores the states of environments in their slots, if they are in the simulators."""

    @abstractmethod
    def _load(self, slots: Sequence[int]) -> None:
        """Makes the simulators continue from the stored states of environments."""

    @abstractmethod
    def _step_slots(self, chosen: Sequence[int], actions: Array, result: ChunkResult) -> None:
        """Steps environments whose episodes are not over. Writes rewards, ends and valid actions of the result."""

    def _choose_slots(self, slots: Sequence[int] | None) -> Sequence[int]:
        """Returns the environments of a call; see VectorEnv."""
        return range(self.num_envs) if slots is None else [int(slot) for slot in slots]


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
