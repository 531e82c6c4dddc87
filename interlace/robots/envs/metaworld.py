"""MetaWorld: fifty tasks of one robot arm, in MuJoCo (`pip install 'interlace[robots]'`).

State: 39 numbers: 0-2 the hand, 3 the gripper's opening, 4-10 and 11-17 two objects, 18-35 the same of the previous
step, 36-38 the goal. Actions: the hand's movement in x, y, z and the gripper's force, each in -1 ... 1. All
environments of a task share one simulator by swapping states, which is exact. A separate generator, keyed by the id,
draws each initial state.
"""

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from interlace.core.errors import UserError, nearest
from interlace.robots.envs.base import EnvSettings, Simulator, Step, import_required
from interlace.robots.envs.camera_change import CameraChange, change_camera, check_pictures
from interlace.robots.envs.mujoco_camera import MujocoCamera, list_cameras
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

INSTRUCTIONS: Mapping[str, str] = {
    "reach-v3": "reach the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and place it at the goal",
    "door-open-v3": "open the door",
    "drawer-open-v3": "open the drawer",
    "drawer-close-v3": "close the drawer",
    "button-press-topdown-v3": "press the button from above",
    "peg-insert-side-v3": "insert the peg sideways",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
"""Instructions of the ten tasks of MT10; other tasks use the words of their names."""
_SHARED = ("reach-v3", "push-v3", "pick-place-v3", "door-open-v3")
BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "MT10": (
        *_SHARED, "drawer-open-v3", "drawer-close-v3", "button-press-topdown-v3", "peg-insert-side-v3",
        "window-open-v3", "window-close-v3",
    ),
    "ML10": (
        *_SHARED, "drawer-close-v3", "button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "sweep-v3",
        "basketball-v3",
        "drawer-open-v3", "door-close-v3", "shelf-place-v3", "sweep-into-v3", "lever-pull-v3",
    ),
}  # fmt: skip
"""Tasks of the protocols, in the library's order; the last five of ML10 are its test tasks."""
NUM_GOALS = 50
"""Initial states of a task in a protocol."""
_PLAIN = (np.ndarray, np.generic, float, int, bool, str, type(None))
"""Types of the environment's attributes that change in an episode; other attributes belong to the simulator."""
_POSES = ("xpos", "site_xpos")
"""Fields of MuJoCo's data into which attributes may be views, such as `init_left_pad`: they change with each step."""
_VIDEO_SIDE = 192
"""Side of a video's pictures, in pixels."""
_MODEL_FIELDS = ("body_pos", "site_pos")
"""Fields of MuJoCo's model that a reset of any task changes, to place objects."""
_KEPT_HANDS = 4
"""Number of kept results of the hand's movement to its start."""


class MetaWorldSettings(EnvSettings):
    """Settings of MetaWorld."""

    tasks: tuple[str, ...] = ("reach-v3",)
    benchmark: Literal["MT10", "ML10"] | None = None
    """Protocol (arXiv 1910.10897). Its tasks are `tasks` unless these are given; the tasks of ML10 are ten to train on
    and five to test on. Each task has 50 fixed initial states, by the id modulo 50. ML10 hides the goal: numbers 36 to
    38 of the state are 0."""
    reward: Literal["dense", "success"] = "dense"
    """`dense`: MetaWorld's reward, 0 to 10 per simulated step. `success`: 1 at a step that solves the task, else 0."""
    light: bool = False
    """Computes only the physics inside a chunk: reward and success come from its last action, and the numbers
    of the previous step in the state are numbers of the previous chunk. 1.8 to 3.8 times the steps per second."""
    image_size: int = 0
    """Side of the observation `image`, in pixels. If 0, no image."""
    camera: str = "corner2"
    """Camera of the observation `image` and of videos."""

    @property
    def rewards_chunks(self) -> bool:
        return self.light

    @model_validator(mode="before")
    @classmethod
    def _take_tasks(cls, data: object) -> object:
        if isinstance(data, Mapping) and "tasks" not in data and data.get("benchmark") in BENCHMARKS:
            return {**data, "tasks": BENCHMARKS[data["benchmark"]]}
        return data


class MetaWorld(Simulator):
    """One task of MetaWorld."""

    Settings = MetaWorldSettings
    swaps = True
    moves_camera = True
    memory_bytes = 200 << 20
    settings: MetaWorldSettings

    def __init__(self, settings: MetaWorldSettings, task: str) -> None:
        """Raises UserError for an unknown task or camera, or for images without a renderer."""
        super().__init__(settings, task)
        task = self.task
        library = import_required("metaworld", family="metaworld", extra="robots")
        self._mujoco = import_required("mujoco", family="metaworld", extra="robots")
        kinds = import_required("metaworld.env_dict", family="metaworld", extra="robots").ALL_V3_ENVIRONMENTS
        if task not in kinds:
            raise UserError(f"metaworld has no task {task!r}.{nearest(task, kinds)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns about the precision of bounds
            self._env: Any = kinds[task]()
        hides_goal = settings.benchmark is not None and settings.benchmark.startswith("ML")
        given = {"env_cls": kinds[task], "rand_vec": None, "partially_observable": hides_goal}
        self._env.set_task(library.Task(env_name=task, data=pickle.dumps(given)))
        # Each reset draws the goal of the task, and the library's step count ends no episode.
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        self._env.max_path_length = 10**9
        self._spec = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._size = self._mujoco.mj_stateSize(self._env.model, self._spec)
        base = import_required("metaworld.sawyer_xyz_env", family="metaworld", extra="robots").SawyerXYZEnv
        if kinds[task]._reset_hand is base._reset_hand:  # three tasks have another movement
            self._simulate_hand: Callable[[int], None] = self._env._reset_hand
            self._kept_hands: OrderedDict[tuple[int | bytes, ...], NDArray[np.float64]] = OrderedDict()
            self._env._reset_hand = self._reset_hand
        self._observation: NDArray[np.float64] = np.zeros(39)
        self._expert: Any = None
        self._renderers: dict[int, MujocoCamera] = {}
        """Cameras by the side of the picture, in pixels."""
        if self.camera_change:
            self._move_camera(self.camera_change)
        if settings.image_size:
            self._draw_camera(settings.image_size)

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        found = {"state": ArraySpec(shape=(39,), dtype="float32")}
        if size := self.settings.image_size:
            found["image"] = ArraySpec(shape=(size, size, 3), dtype="uint8")
        return found

    @property
    def action_spec(self) -> ActionSpec:
        ones = np.ones(4, np.float32)
        return ActionSpec(low=-ones, high=ones)

    @property
    def instruction(self) -> str:
        return INSTRUCTIONS.get(self.task, self.task.rsplit("-v", 1)[0].replace("-", " "))

    def reset(self, init_state: int, seed: int) -> None:  # noqa: ARG002 - its physics has no noise
        """Draws the positions of hand, object and goal."""
        number = init_state % NUM_GOALS if self.settings.benchmark else init_state
        self._env._np_random = np.random.default_rng(number)
        self._env._did_see_sim_exception = False
        self._mujoco.mj_resetData(self._env.model, self._env.data)
        self._observation = np.array(self._env.reset()[0])

    def step(self, action: Array, *, is_read: bool) -> Step:
        env = self._env
        if self.settings.light and not is_read:
            env.set_xyz_action(action[:3])
            env.do_simulation([action[3], -action[3]], n_frames=env.frame_skip)
            return Step()
        observation, reward, _, _, info = env.step(action)
        self._check_stability()
        self._observation = np.array(observation)
        success = info["success"] > 0
        return Step(reward=float(success) if self.settings.reward == "success" else float(reward), success=success)

    def observe(self) -> Observation:
        found: dict[str, Array] = {"state": self._observation.astype(np.float32)}
        if self.settings.image_size:
            found["image"] = self._draw_camera(self.settings.image_size)
        return found

    def save(self) -> object:
        """Returns the physics, the placed bodies and the environment's changing attributes."""
        env = self._env
        physics = self._read_physics()
        fields = [getattr(env.model, name).copy() for name in _MODEL_FIELDS]
        own = {name: _keep_value(env.data, value) for name, value in vars(env).items() if isinstance(value, _PLAIN)}
        return physics, fields, own, self._observation

    def load(self, state: object) -> None:
        saved: Any = state
        physics, fields, own, self._observation = saved
        env = self._env
        self._set_physics(physics)
        for name, value in zip(_MODEL_FIELDS, fields, strict=True):
            getattr(env.model, name)[:] = value
        vars(env).update({name: _restore_value(env.data, value) for name, value in own.items()})

    def expert_action(self) -> Array:
        """Returns the action of MetaWorld's scripted policy for the task, which reads the goal if it is hidden too."""
        if self._expert is None:
            policies = import_required("metaworld.policies", family="metaworld", extra="robots").ENV_POLICY_MAP
            self._expert = policies[self.task]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the policies warn about clipped gains
            action = self._expert.get_action(np.concatenate([self._observation[:-3], self._env._target_pos]))
        return np.clip(action, -1, 1).astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        # load() restores the physics alone: the drawn poses belong to the last simulated step, perhaps of another
        # environment.
        for compute in (self._mujoco.mj_kinematics, self._mujoco.mj_comPos, self._mujoco.mj_camlight):
            compute(self._env.model, self._env.data)
        return self._draw_camera(max(self.settings.image_size, _VIDEO_SIDE))

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._env.close()

    def _read_physics(self) -> NDArray[np.float64]:
        physics = np.empty(self._size)
        self._mujoco.mj_getState(self._env.model, self._env.data, physics, self._spec)
        return physics

    def _set_physics(self, physics: NDArray[np.float64]) -> None:
        self._mujoco.mj_setState(self._env.model, self._env.data, physics, self._spec)

    def _reset_hand(self, steps: int = 50) -> None:
        """Moves the hand to its start, in place of the library's method, which simulates 50 actions twice in each reset
        and takes most of its time.

        Its result depends only on the physics, the bodies' positions and the hand's start, so all actions except the
        last are simulated once for each of these. The last one computes the poses of this reset. steps: number of
        actions.
        """
        inputs = (self._read_physics(), self._env.model.body_pos, np.asarray(self._env.hand_init_pos))
        key = (steps, *(array.tobytes() for array in inputs))
        kept = self._kept_hands.get(key)
        if kept is None:
            self._simulate_hand(steps - 1)
            kept = self._kept_hands[key] = self._read_physics()
            if len(self._kept_hands) > _KEPT_HANDS:
                self._kept_hands.popitem(last=False)
        else:
            self._kept_hands.move_to_end(key)
            self._set_physics(kept)
        self._simulate_hand(1)

    def _draw_camera(self, side: int) -> NDArray[np.uint8]:
        if side not in self._renderers:
            self._renderers[side] = MujocoCamera(self._env.model, self.settings.camera, side)
        return self._renderers[side].draw(self._env.data)

    def _move_camera(self, change: CameraChange) -> None:
        """Moves the camera of images. Raises UserError if the policy reads none, so that the change has no effect."""
        check_pictures(self.task, self.settings.image_size)
        model, camera = self._env.model, self.settings.camera
        names = list_cameras(model)
        if camera in names:  # an unknown one is refused when it draws
            change_camera(model, names.index(camera), change)

    def _check_stability(self) -> None:
        """Raises FloatingPointError if MuJoCo's state is unusable; MuJoCo only counts such events."""
        kinds, warned = self._mujoco.mjtWarning, self._env.data.warning
        bad = [warned[int(kind)] for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)]
        if any(one.number for one in bad):
            for one in bad:
                one.number = 0  # the simulator continues with another environment's state
            raise FloatingPointError("MuJoCo's state became unstable (NaN, infinite or huge)")


@dataclass(frozen=True, slots=True)
class _PoseView:
    """Attribute that is a view into MuJoCo's data, instead of a copy of the numbers."""

    field: str
    row: int


def _keep_value(data: Any, value: Any) -> Any:
    """Returns a copy of an attribute. A view into MuJoCo's data stays one, because rewards read it after each step."""
    if not isinstance(value, np.ndarray):
        return value
    for field in () if value.flags.owndata else _POSES:
        rows = getattr(data, field)
        if value.shape == rows.shape[1:] and np.may_share_memory(value, rows):
            return _PoseView(field, (_find_address(value) - _find_address(rows)) // rows.strides[0])
    return value.copy()


def _restore_value(data: Any, value: Any) -> Any:
    if isinstance(value, _PoseView):
        return getattr(data, value.field)[value.row]
    return value.copy() if isinstance(value, np.ndarray) else value


def _find_address(array: NDArray[np.float64]) -> int:
    return int(array.__array_interface__["data"][0])
