"""MJX: MuJoCo in JAX, a batch of environments per call, on a CPU or a GPU (`pip install 'interlace[mjx]'`).

Tasks: mujoco_tasks.py. JAX compiles the step for each task and number of environments: seconds of CPU time without
contacts, several times as long with them. Tensors are JAX arrays, which torch reads through DLPack without a copy.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import import_required
from interlace.robots.envs.batch import BatchStep, DeviceArray, F
from interlace.robots.envs.mujoco_batch import MujocoBatch, MujocoBatchSettings
from interlace.robots.envs.mujoco_tasks import BatchPhysics, find_task
from interlace.rollouts.envs.spec import Array


class MJX(MujocoBatch):
    """One MuJoCo model in JAX."""

    family = "mjx"
    extra = "mjx"
    memory_bytes = 64 << 10  # the workspace of a step

    def __init__(self, settings: MujocoBatchSettings, task: str, num_envs: int) -> None:
        """Raises UserError as MujocoBatch does, and for an absent GPU."""
        # Other parts of the run use the GPU too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._jax: Any = import_required("jax", family=self.family, extra=self.extra)
        import_required("mujoco.mjx", family=self.family, extra=self.extra)
        self.xp = self._jax.numpy
        super().__init__(settings, task, num_envs)
        try:
            self._device = self._jax.devices(settings.device)[0]
        except RuntimeError as error:
            raise UserError(
                f"env.settings.device={settings.device!r}, and JAX finds no such device here ({error}). Set cpu, or "
                "install JAX for CUDA: pip install 'jax[cuda12]'"
            ) from error
        self._advance, self._observe, self._write = _compile(self.task, self.state_parts)
        self._states = self.to_device(self.make_default_states())
        self._none = self.to_device(np.zeros(num_envs, np.bool_))

    def to_device(self, array: Array) -> DeviceArray:
        return self._jax.device_put(np.array(array), self._device)

    def to_host(self, array: DeviceArray) -> Array:
        """Returns a tensor as an array that cannot be written."""
        return np.asarray(array)

    def compile(self, function: F) -> F:
        compiled: F = self._jax.jit(function)
        return compiled

    def step(self, actions: DeviceArray, mask: DeviceArray) -> BatchStep:
        self._states, reward, terminated, success = self._advance(self._states, actions, mask)
        return BatchStep(reward=reward, terminated=terminated, truncated=self._none, success=success)

    def observe(self, mask: DeviceArray) -> Mapping[str, DeviceArray]:  # noqa: ARG002 - all rows are as fast
        return {"state": self._observe(self._states)}

    def read_states(self) -> FloatArray:
        return np.array(self._states)

    def write_states(self, states: DeviceArray, mask: DeviceArray) -> None:
        self._states = self._write(self._states, states, mask)


@cache
def _compile(name: str, parts: int) -> tuple[Any, Any, Any]:
    """Returns three functions of a task. They remain after offload(), so that onload() does not compile them again.

    JAX compiles them for each number of environments at the first call. parts: MuJoCo's bits of a state.
    step: (states [B, S], actions [B, A], mask [B]) -> states, reward, terminated, success.
    observe: states [B, S] -> [B, D].
    write: (states, new states [B, S], mask [B]) -> states.
    """
    jax: Any = import_required("jax", family=MJX.family, extra=MJX.extra)
    mjx: Any = import_required("mujoco.mjx", family=MJX.family, extra=MJX.extra)
    mujoco: Any = import_required("mujoco", family=MJX.family, extra=MJX.extra)
    task, xp = find_task(name), jax.numpy
    host_model = mujoco.MjModel.from_xml_string(task.mjcf)
    try:
        model, empty = mjx.put_model(host_model, impl="jax"), mjx.make_data(host_model, impl="jax")
    except NotImplementedError as error:
        raise UserError(
            f"MJX cannot simulate the model of task {name!r}: {error}. Try the family mujoco_warp."
        ) from error

    def advance(state: DeviceArray, action: DeviceArray) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        data = mjx.set_state(model, empty, state, parts).replace(ctrl=action)
        data = jax.lax.fori_loop(0, task.num_substeps, lambda _, each: mjx.step(model, each), data)
        return mjx.get_state(model, data, parts), data.qpos, data.qvel

    def step(states: DeviceArray, actions: DeviceArray, mask: DeviceArray) -> tuple[DeviceArray, ...]:
        new, qpos, qvel = jax.vmap(advance)(states, actions)
        found = task.judge(xp, BatchPhysics(qpos=qpos, qvel=qvel, ctrl=actions))
        return xp.where(mask[:, None], new, states), found.reward, found.terminated, found.success

    def observe(states: DeviceArray) -> DeviceArray:
        data = jax.vmap(lambda state: mjx.set_state(model, empty, state, parts))(states)
        return task.observe(xp, BatchPhysics(qpos=data.qpos, qvel=data.qvel, ctrl=data.ctrl))

    def write(states: DeviceArray, new: DeviceArray, mask: DeviceArray) -> DeviceArray:
        return xp.where(mask[:, None], new, states)

    return jax.jit(step), jax.jit(observe), jax.jit(write)
