"""ManiSkill: tasks of the SAPIEN simulator (`pip install 'interlace[maniskill]'`; its assets are CC BY-NC 4.0).

State: the task's observation mode `state`. Actions: numbers of the control mode, each in -1 ... 1. It needs a Vulkan
driver even if nothing is drawn: on a machine without a GPU, Mesa 25's lavapipe is enough (docs/robots.md).
It simulates on processor cores, with one environment per simulator. ManiSkill's GPU vector environments are not used.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.robots.envs.base import EnvSettings, Simulator, Step, import_required
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

INSTRUCTIONS: Mapping[str, str] = {
    "PushCube-v1": "push the cube to the goal",
    "PullCube-v1": "pull the cube to the goal",
    "PickCube-v1": "pick up the cube and hold it at the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "PegInsertionSide-v1": "insert the peg into the hole from the side",
    "PlugCharger-v1": "plug the charger into the receptacle",
}
"""Instructions by task; other tasks use the words of their names."""
_CAMERA = "base_camera"


class ManiSkillSettings(EnvSettings):
    """Settings of ManiSkill."""

    tasks: tuple[str, ...] = ("PushCube-v1",)
    reward: Literal["dense", "normalized_dense", "sparse", "none"] = "normalized_dense"
    """Reward mode of ManiSkill."""
    control: str = ""
    """Control mode, such as pd_ee_delta_pose. If empty, the task's default."""
    image_size: int = 0
    """Side of the observation `image`, in pixels. If 0, no image."""


class ManiSkill(Simulator):
    """One task of ManiSkill."""

    Settings = ManiSkillSettings
    memory_bytes = 560 << 20
    settings: ManiSkillSettings

    def __init__(self, settings: ManiSkillSettings, task: str) -> None:
        """Raises UserError for an unknown task or mode, and without a Vulkan driver."""
        super().__init__(settings, task)
        gymnasium = import_required("gymnasium", family="maniskill", extra="maniskill")
        import_required("mani_skill.envs", family="maniskill", extra="maniskill")
        size = settings.image_size
        given: dict[str, Any] = {"control_mode": settings.control} if settings.control else {}
        if size:
            given["sensor_configs"] = {"width": size, "height": size}
        try:
            self._env: Any = gymnasium.make(
                task,
                max_episode_steps=1 << 30,  # the horizon is counted by the caller
                obs_mode="state+rgb" if size else "state",
                reward_mode=settings.reward,
                sim_backend="physx_cpu",
                render_backend="cpu",
                render_mode="rgb_array",
                **given,
            )
            self._observed, _ = self._env.reset(seed=0)
        except RuntimeError as error:
            raise UserError(
                f"ManiSkill finds nothing to draw with ({error}), which it needs for states too. Install a Vulkan "
                "loader and driver (Debian: libvulkan1, and mesa-vulkan-drivers of version 25 or later, which is in "
                "bookworm-backports), and name the driver's file in VK_ICD_FILENAMES where it is not found"
            ) from error
        except (gymnasium.error.Error, AssertionError, KeyError, NotImplementedError, ValueError) as error:
            raise UserError(f"ManiSkill cannot make {task!r}: {error}") from error

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        return {name: ArraySpec(shape=a.shape, dtype=str(a.dtype)) for name, a in self.observe().items()}

    @property
    def action_spec(self) -> ActionSpec:
        space = self._env.unwrapped.single_action_space
        return ActionSpec(low=np.asarray(space.low, np.float32), high=np.asarray(space.high, np.float32))

    @property
    def instruction(self) -> str:
        words = re.findall(r"[A-Z][a-z]*|\d+", self.task.rsplit("-v", 1)[0])
        return INSTRUCTIONS.get(self.task, " ".join(words).lower())

    def reset(self, init_state: int, seed: int) -> None:  # noqa: ARG002 - its physics has no noise
        """Resets with the id as ManiSkill's seed."""
        self._observed, _ = self._env.reset(seed=init_state)

    def step(self, action: Array, *, is_read: bool) -> Step:  # noqa: ARG002 - it has nothing that could be left out
        self._observed, reward, _, _, info = self._env.step(np.asarray(action, np.float32))
        # ManiSkill's `terminated` means success or failure.
        return Step(
            reward=float(reward[0]),
            terminated=bool(info["fail"][0]) if "fail" in info else False,
            success=bool(info["success"][0]) if "success" in info else False,
        )

    def observe(self) -> Observation:
        if not self.settings.image_size:
            return {"state": self._observed[0].numpy().astype(np.float32)}
        image = self._observed["sensor_data"][_CAMERA]["rgb"][0]
        return {"state": self._observed["state"][0].numpy().astype(np.float32), "image": image.numpy().astype(np.uint8)}

    def save(self) -> object:
        """Returns the states of bodies, joints and controllers; a continuation from it differs by about 1e-6."""
        return _copy_state(self._env.unwrapped.get_state_dict())

    def load(self, state: object) -> None:
        self._env.unwrapped.set_state_dict(_copy_state(state))
        self._observed = self._env.unwrapped.get_obs()

    def render(self) -> NDArray[np.uint8]:
        """Draws the scene in the view of ManiSkill's videos."""
        return np.asarray(self._env.render()[0].numpy(), np.uint8)

    def close(self) -> None:
        self._env.close()


def _copy_state(state: Any) -> Any:
    return {name: _copy_state(value) for name, value in state.items()} if isinstance(state, Mapping) else state.clone()
