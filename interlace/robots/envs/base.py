"""Interface of environments: many of one family in parallel, reset individually and stepped by chunks of actions.

A family is a file of this folder with a subclass of `Simulator` (one environment at a time; `SimulatedEnvs` makes a
vector of it) or of `BatchSimulator` (a batch at once on a device; `BatchedEnvs`). A user's family is
`package.module:Name`, one of these or a `VectorEnv`.

Shapes: N = environments of one family, n = environments of a call, K = actions of a chunk, A = numbers of one action.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.camera_change import CameraChange
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, EnvSpec, Observation

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Result of one action."""

    reward: float = 0.0
    terminated: bool = False
    """True if the task ended the episode, other than by success."""
    truncated: bool = False
    """True if a limit inside the simulator ended the episode."""
    success: bool = False


class TaskSimulator(ABC):
    """Settings, task and shapes of a simulator, of one environment (Simulator) or of a batch (BatchSimulator)."""

    Settings: ClassVar[type[EnvSettings]] = EnvSettings
    """Class of the settings of a family of environments."""
    moves_camera: ClassVar[bool] = False
    """True if the simulator applies `camera_change`."""
    memory_bytes: ClassVar[int] = 0
    """Approximate host memory of one simulator, or of one environment of a batch; 0 if negligible."""

    def __init__(self, settings: Any, task: str) -> None:
        """settings: an instance of the class's `Settings`. Raises UserError for an unknown task or no renderer, and for
        a changed camera (EnvSettings.cameras) that the simulator cannot move.
        """
        self.settings = settings
        self.task, self.camera_change = settings.split_task(task)
        """Name of the task in the simulator, and the change of its camera; None for none."""
        if self.camera_change and not self.moves_camera:
            raise UserError(
                f"task {task!r} changes the camera, and environments of {type(self).__name__} have none that moves. "
                f"Remove it from env.settings.tasks, or name {self.task!r}."
            )

    @property
    @abstractmethod
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Names, shapes and types of the arrays of an observation."""

    @property
    @abstractmethod
    def action_spec(self) -> ActionSpec:
        """Ranges of the numbers of an action."""

    @property
    def instruction(self) -> str:
        """Instruction of the task; empty if the family has none."""
        return ""

    def close(self) -> None:  # noqa: B027 - most simulators hold nothing that Python does not free
        """Frees the simulator's resources."""


class Simulator(TaskSimulator):
    """One environment of one task at a time. An exception ends the episode in which it is raised."""

    swaps: ClassVar[bool] = False
    """True if load() is fast and exact: one simulator per task then serves all environments by swapping states."""
    keeps_starts: ClassVar[bool] = True
    """False if the same start may give another state later, so that states after a reset are not cached."""

    @abstractmethod
    def reset(self, init_state: int, seed: int) -> None:
        """Starts an episode; see Start."""

    @abstractmethod
    def step(self, action: Array, *, is_read: bool) -> Step:
        """Executes an action, [A] within its bounds.

        is_read: False if the state after this action is not read, so that only the physics must be computed.
        """

    @abstractmethod
    def observe(self) -> Observation:
        """Returns the current observation, in arrays that later steps do not change."""

    @abstractmethod
    def save(self) -> object:
        """Returns the whole current state as an object that can be pickled and that later steps do not change."""

    @abstractmethod
    def load(self, state: object) -> None:
        """Restores a state, which may come from another process."""

    def render(self) -> NDArray[np.uint8]:
        """Draws the current state, [H, W, 3]. Raises UserError without a renderer."""
        raise UserError(f"environments of {type(self).__name__} cannot be drawn")

    def expert_action(self) -> Array:
        """Returns a scripted expert's action for the current state, [A]. Raises UserError if the task has no expert."""
        raise UserError(f"{type(self).__name__} has no scripted expert for task {self.task!r}")


class RetracedSimulator(Simulator):
    """Simulator whose state is its start and all later actions, which load() repeats.

    This is exact if start and actions determine the state. It takes as long as the steps themselves.
    """

    def __init__(self, settings: Any, task: str) -> None:
        super().__init__(settings, task)
        self.start = (0, 0)
        """Initial state and seed of the episode."""
        self.actions: list[Array] = []
        """Actions since the start."""

    @abstractmethod
    def begin(self, init_state: int, seed: int) -> None:
        """Starts an episode; see Start."""

    @abstractmethod
    def act(self, action: Array) -> Step:
        """Executes an action, [A]."""

    def reset(self, init_state: int, seed: int) -> None:
        self.start, self.actions = (init_state, seed), []
        self.begin(init_state, seed)

    def step(self, action: Array, *, is_read: bool) -> Step:  # noqa: ARG002 - nothing could be left out
        self.actions.append(np.array(action))
        return self.act(action)

    def save(self) -> object:
        return self.start, list(self.actions)

    def load(self, state: object) -> None:
        saved: Any = state
        start, actions = saved
        self.reset(*start)
        for action in actions:
            self.step(action, is_read=True)


class VectorEnv(ABC):
    """Environments of one family, numbered 0 to num_envs - 1.

    slots: numbers of the environments of a call, in the order of its rows, without repetition. If None, all.
    """

    Settings: ClassVar[type[EnvSettings]] = EnvSettings
    spec: EnvSpec

    def __init__(self, settings: Any, num_envs: int) -> None:
        """settings: an instance of the class's `Settings`."""
        self.settings, self.num_envs = settings, num_envs

    def prepare(self) -> None:  # noqa: B027 - few families compile
        """Does work that takes long and that `spec` does not need, such as compiling. Called once, before reset()."""

    @abstractmethod
    def reset(
        self,
        *,
        seeds: Sequence[int],
        task_ids: Sequence[int],
        init_state_ids: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> Observation:
        """Starts episodes, [n] each; see Start. Returns the first observations, [n, ...]. Raises SimulatorError."""

    @abstractmethod
    def chunk_step(self, actions: Array, slots: Sequence[int] | None = None) -> ChunkResult:
        """Executes actions, [n, K, A]. An environment whose episode is over does not change."""

    @abstractmethod
    def observe(self, slots: Sequence[int] | None = None) -> Observation:
        """Returns the current observations, [n, ...]."""

    @abstractmethod
    def get_state(self, slots: Sequence[int] | None = None) -> list[bytes]:
        """Returns whole states, including episode counters, for set_state() in any process of the same family."""

    @abstractmethod
    def set_state(self, states: Sequence[bytes], slots: Sequence[int] | None = None) -> None:
        """Restores states. They are unpickled, so only results of get_state() are safe."""

    @abstractmethod
    def render(self, slots: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
        """Draws the current states, [H, W, 3] each. Raises UserError without a renderer."""

    @abstractmethod
    def expert_actions(self, slots: Sequence[int] | None = None, count: int = 1) -> Array:
        """Returns a scripted expert's next `count` actions from the current states, [n, count, A].

        The states do not change. Raises UserError if the expert is missing.
        """

    @abstractmethod
    def offload(self) -> None:
        """Frees the simulators and keeps the states, even during episodes."""

    @abstractmethod
    def onload(self) -> None:
        """Creates the simulators again and continues from the states."""

    @abstractmethod
    def close(self) -> None:
        """Frees all resources."""


def import_required(module: str, *, family: str, extra: str) -> ModuleType:
    """Imports a library that a family adapts. Raises UserError that names the extra with the library."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"environments of {family!r} need {module}, which is not installed here ({error}). "
            f"Install it: pip install 'interlace[{extra}]'"
        ) from error
