"""MuJoCo models in simulators that step a batch: the common part of MJX and MuJoCo Warp.

Shapes: B = environments, S = numbers of a state: time, positions, velocities, activations, the accelerations that
warm-start the solver, controls, applied forces, active equalities, mocap poses and user data.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import FloatArray
from interlace.robots.envs.base import import_required
from interlace.robots.envs.batch import BatchSettings, BatchSimulator, DeviceArray
from interlace.robots.envs.mujoco_camera import MujocoCamera
from interlace.robots.envs.mujoco_tasks import find_task
from interlace.rollouts.envs.spec import ActionSpec, ArraySpec, Start

_STATE = (
    *("TIME", "QPOS", "QVEL", "ACT", "HISTORY", "WARMSTART", "CTRL", "QFRC_APPLIED", "XFRC_APPLIED", "EQ_ACTIVE"),
    *("MOCAP_POS", "MOCAP_QUAT", "USERDATA"),
)
"""Parts of a state, by MuJoCo's names."""
_PICTURE = 256
"""Side of a drawn picture, in pixels."""


class MujocoBatchSettings(BatchSettings):
    """Settings of MuJoCo's batch simulators. A task is a name, or your MujocoTask as package.module:Class."""

    tasks: tuple[str, ...] = ("cartpole-balance",)
    camera: str = "side"
    """Camera of the model that draws films."""


class MujocoBatch(BatchSimulator):
    """One MuJoCo model in a batch. A state is saved exactly: it contains everything that a step reads."""

    Settings = MujocoBatchSettings
    settings: MujocoBatchSettings
    family: ClassVar[str]
    extra: ClassVar[str]
    """Extra of interlace that installs the simulator."""

    def __init__(self, settings: MujocoBatchSettings, task: str, num_envs: int) -> None:
        """Raises UserError for an unknown task, a missing library, or a model with a state that cannot be saved."""
        super().__init__(settings, task, num_envs)
        self.mujoco_task = find_task(self.task)
        self._mujoco: Any = import_required("mujoco", family=self.family, extra=self.extra)
        try:
            self.model: Any = self._mujoco.MjModel.from_xml_string(self.mujoco_task.mjcf)
        except ValueError as error:
            raise UserError(f"MuJoCo cannot compile the model of task {self.task!r}: {error}") from error
        self._camera: MujocoCamera | None = None
        bits = self._mujoco.mjtState
        self.state_parts = sum(int(getattr(bits, f"mjSTATE_{name}")) for name in _STATE)
        """MuJoCo's bits of a state."""
        self.state_size = self._mujoco.mj_stateSize(self.model, self.state_parts)
        if self.state_size != self._mujoco.mj_stateSize(self.model, bits.mjSTATE_INTEGRATION):
            raise UserError(
                f"task {self.task!r} has plugins or plastic parts, whose state {self.family} cannot save. Remove them "
                "from its model."
            )

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        found = self.observe(self.to_device(np.ones(self.num_envs, np.bool_)))
        return {name: ArraySpec(shape=tuple(array.shape[1:]), dtype="float32") for name, array in found.items()}

    @property
    def action_spec(self) -> ActionSpec:
        """Bounds of the actuators. Raises UserError if one has none."""
        if not self.model.actuator_ctrllimited.all():
            raise UserError(f"an actuator of task {self.task!r} has no limit: give each a ctrlrange in its model")
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        return ActionSpec(low=low, high=high)

    @property
    def instruction(self) -> str:
        return self.mujoco_task.instruction

    @abstractmethod
    def read_states(self) -> FloatArray:
        """Returns all states, [B, S], as a new array."""

    @abstractmethod
    def write_states(self, states: DeviceArray, mask: DeviceArray) -> None:
        """Replaces the states within the mask. states: [B, S]."""

    def reset(self, mask: DeviceArray, starts: Mapping[int, Start]) -> None:
        """Draws each start from a generator that its task and its initial state id seed. The physics has no noise."""
        data = self._mujoco.MjData(self.model)
        states = np.zeros((self.num_envs, self.state_size), np.float32)
        for row, start in starts.items():
            self._mujoco.mj_resetData(self.model, data)
            random = np.random.default_rng(stable_hash("mujoco start", self.task, start.init_state))
            self.mujoco_task.draw_start(random, data)
            states[row] = self._get_state(data)
        self.write_states(self.to_device(states), mask)

    def save(self, rows: Sequence[int]) -> list[object]:
        states = self.read_states()
        return [states[row] for row in rows]

    def load(self, states: Mapping[int, object]) -> None:
        given, mask = np.zeros((self.num_envs, self.state_size), np.float32), np.zeros(self.num_envs, np.bool_)
        for row, state in states.items():
            given[row], mask[row] = np.asarray(state), True
        self.write_states(self.to_device(given), self.to_device(mask))

    def render(self, row: int) -> NDArray[np.uint8]:
        """Draws an environment on the host. Raises UserError without a renderer or for an unknown camera."""
        data = self._mujoco.MjData(self.model)
        self._mujoco.mj_setState(self.model, data, self.read_states()[row].astype(np.float64), self.state_parts)
        self._mujoco.mj_forward(self.model, data)
        self._camera = self._camera or MujocoCamera(self.model, self.settings.camera, _PICTURE)
        return self._camera.draw(data)

    def close(self) -> None:
        if self._camera:
            self._camera.close()

    def make_default_states(self) -> FloatArray:
        """Returns the model's default state for each environment, [B, S]."""
        state = self._get_state(self._mujoco.MjData(self.model))
        return np.tile(state, (self.num_envs, 1))

    def _get_state(self, data: Any) -> FloatArray:
        state = np.zeros(self.state_size, np.float64)
        self._mujoco.mj_getState(self.model, data, state, self.state_parts)
        return state.astype(np.float32)
