"""MuJoCo Warp: MuJoCo's physics with contacts on a GPU or a CPU, a batch per call (`pip install 'interlace[warp]'`).

Tasks: mujoco_tasks.py. Warp compiles its kernels once per machine, about a minute, and keeps them in its cache. Tensors
are torch tensors that share the simulator's memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import import_required
from interlace.robots.envs.batch import BatchStep, DeviceArray
from interlace.robots.envs.mujoco_batch import MujocoBatch, MujocoBatchSettings
from interlace.robots.envs.mujoco_tasks import BatchPhysics
from interlace.rollouts.envs.spec import Array, Start

_FIELDS = (
    *("time", "qpos", "qvel", "act", "history", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied", "eq_active"),
    *("mocap_pos", "mocap_quat", "userdata"),
)
"""Arrays of a state, in the order of a state's numbers."""
_LOSSES = ("NEFC", "NJMAX_NNZ", "BROADPHASE", "NARROWPHASE", "CCD", "HFIELD", "NVMAX", "EPA_HORIZON")
"""Overflows with which a step leaves out contacts or constraints."""


class MujocoWarp(MujocoBatch):
    """One MuJoCo model in Warp."""

    family = "mujoco_warp"
    extra = "warp"
    memory_bytes = 256 << 10  # contacts and constraints of one environment

    def __init__(self, settings: MujocoBatchSettings, task: str, num_envs: int) -> None:
        """Raises UserError as MujocoBatch does, and for an absent GPU."""
        self.xp = self._torch = import_required("torch", family=self.family, extra=self.extra)
        warp: Any = import_required("warp", family=self.family, extra=self.extra)
        warp.config.log_level = warp.LOG_WARNING  # else it prints each kernel that it loads
        self._library: Any = import_required("mujoco_warp", family=self.family, extra=self.extra)
        super().__init__(settings, task, num_envs)
        self._warp = warp
        if settings.device == "cuda" and not warp.is_cuda_available():
            raise UserError("env.settings.device='cuda', and Warp finds no GPU here. Set cpu.")
        self._device = warp.get_device("cuda:0" if settings.device == "cuda" else "cpu")
        with warp.ScopedDevice(self._device):
            try:
                self._model = self._library.put_model(self.model)
            except NotImplementedError as error:
                raise UserError(f"MuJoCo Warp cannot simulate the model of task {self.task!r}: {error}") from error
            self._data = self._library.make_data(self.model, nworld=num_envs)
        if settings.device == "cuda":
            # The order of contacts would otherwise depend on the order in which threads run.
            self._model.opt.deterministic = self._library.DeterminismType.ALL
        arrays = [getattr(self._data, name) for name in _FIELDS]
        self._views = [warp.to_torch(array) for array in arrays if array.size]
        self._qpos, self._qvel, self._ctrl, self._overflow = (
            warp.to_torch(getattr(self._data, name)) for name in ("qpos", "qvel", "ctrl", "overflow")
        )
        kinds = self._library.OverflowType
        self._losses = {name: int(getattr(kinds, name)) for name in _LOSSES}
        self._none = self.to_device(np.zeros(num_envs, np.bool_))
        self.write_states(self.to_device(self.make_default_states()), ~self._none)

    def to_device(self, array: Array) -> DeviceArray:
        return self._torch.tensor(np.asarray(array), device=str(self._device))

    def to_host(self, array: DeviceArray) -> Array:
        found: Array = array.cpu().numpy()
        return found

    def reset(self, mask: DeviceArray, starts: Mapping[int, Start]) -> None:
        super().reset(mask, starts)
        self._overflow[mask] = 0

    def step(self, actions: DeviceArray, mask: DeviceArray) -> BatchStep:
        """Executes an action in all environments, then restores those outside the mask."""
        before, lost = self._join_state(), self._overflow.clone()
        self._ctrl.copy_(actions)
        with self._warp.ScopedDevice(self._device):
            for _ in range(self.mujoco_task.num_substeps):
                self._library.step(self._model, self._data)
        found = self.mujoco_task.judge(self.xp, self._physics)
        self.write_states(before, ~mask)
        self._overflow.copy_(self._torch.where(mask, self._overflow, lost))
        return BatchStep(reward=found.reward, terminated=found.terminated, truncated=self._none, success=found.success)

    def observe(self, mask: DeviceArray) -> Mapping[str, DeviceArray]:  # noqa: ARG002 - all rows are as fast
        return {"state": self.mujoco_task.observe(self.xp, self._physics)}

    def find_failures(self, rows: Sequence[int]) -> Mapping[int, str]:
        """Returns environments that had more contacts or constraints than the simulator has memory for."""
        lost = self.to_host(self._overflow)
        found = {row: [name for name, bit in self._losses.items() if int(lost[row]) & bit] for row in rows}
        return {row: f"it overflowed ({', '.join(names)})" for row, names in found.items() if names}

    def read_states(self) -> FloatArray:
        return np.array(self.to_host(self._join_state()), np.float32)

    def write_states(self, states: DeviceArray, mask: DeviceArray) -> None:
        begin = 0
        for view in self._views:
            size = view[0].numel()
            part = states[:, begin : begin + size].reshape(view.shape).to(view.dtype)
            view.copy_(self._torch.where(mask.reshape(-1, *[1] * (view.dim() - 1)), part, view))
            begin += size

    @property
    def _physics(self) -> BatchPhysics:
        """The state as tensors that the next step changes."""
        return BatchPhysics(qpos=self._qpos, qvel=self._qvel, ctrl=self._ctrl)

    def _join_state(self) -> DeviceArray:
        """Copies all states to one tensor, [B, S]."""
        return self._torch.cat([view.reshape(self.num_envs, -1).float() for view in self._views], dim=1)
