"""Environment families for the contract tests, and environments that fail on purpose."""

import ctypes
import multiprocessing
import tempfile
import time
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from interlace.robots.envs import load
from interlace.robots.envs.base import ChunkResult, EnvSettings, Simulator, Step, VectorEnv
from interlace.robots.envs.batch import BatchSettings, BatchSimulator, BatchStep
from interlace.robots.envs.load import create_envs
from interlace.robots.envs.stepping import SimulatedEnvs
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation, Start


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family as the suite makes it."""

    name: str
    settings: dict[str, object] = field(default_factory=dict)
    tolerance: float = 0.0
    """Difference of observations after a state was saved, loaded and gone on from."""
    library: str = ""
    """Library that it needs; where it is missing the suite skips."""

    def make(self, num_envs: int, **changed: object) -> VectorEnv:
        given = {"model": dream()} if self.name == "imagined" else {}
        return create_envs(self.name, {**self.settings, **given, **changed}, num_envs)


_DREAMS = tempfile.TemporaryDirectory()


@cache
def dream() -> str:
    """A world model of chunks of two actions, as it is before it has learnt anything."""
    from interlace.robots.world_model.model import EnsembleModel, EnsembleModelConfig

    model = EnsembleModel(EnsembleModelConfig(state_size=3, action_size=2, chunk=2, width=16))
    model.save(Path(_DREAMS.name), np.random.default_rng(0).normal(size=(8, 3)))
    return _DREAMS.name


FAMILIES = [
    Family(name="metaworld", settings={"tasks": ["reach-v3", "push-v3"], "horizon": 20}, library="metaworld"),
    Family(
        name="metaworld",
        settings={"tasks": ["drawer-open-v3"], "horizon": 20, "light": True, "action_repeat": 2},
        library="metaworld",
    ),
    Family(name="gymnasium", settings={"tasks": ["CartPole-v1"], "horizon": 30}, library="gymnasium"),
    Family(name="gymnasium", settings={"tasks": ["Pendulum-v1"], "horizon": 20}, library="gymnasium"),
    Family(
        name="gymnasium",
        settings={"tasks": ["Pendulum-v1"], "horizon": 12, "image_size": 16, "image_channels": "motion"},
        library="gymnasium",
    ),
    Family(name="maniskill", settings={"tasks": ["PushCube-v1"], "horizon": 12}, tolerance=1e-4, library="mani_skill"),
    Family(
        name="mjx", settings={"tasks": ["cartpole-balance", "cartpole-swingup"], "horizon": 20}, library="mujoco.mjx"
    ),
    Family(
        name="mjx",
        settings={"tasks": ["cartpole-swingup"], "horizon": 12, "action_repeat": 2, "frame_stack": 3},
        library="mujoco.mjx",
    ),
    Family(name="mujoco_warp", settings={"tasks": ["push"], "horizon": 12}, library="mujoco_warp"),
    Family(name="libero", settings={"tasks": ["libero_spatial/0"], "horizon": 12}, library="libero"),
    Family(
        name="gymnasium", settings={"tasks": ["tests.contract.retraced:Odd-v0"], "horizon": 12}, library="gymnasium"
    ),
    Family(name="imagined", settings={"tasks": ["dream"], "horizon": 12, "max_disagreement": 1e9}),
    Family(name="tests.contract.envs:Walk", settings={"tasks": ["left", "right"], "horizon": 12}),
    Family(
        name="tests.contract.envs:WalkBatch", settings={"tasks": ["left", "right"], "horizon": 12, "frame_stack": 3}
    ),
]


class WalkSettings(EnvSettings):
    """Settings of Walk."""

    fault: str = ""
    """raise, nan, exit, crash or hang."""
    fault_at: float = 1e9
    """Fault once the place is beyond."""


class Walk(Simulator):
    """A point on a line, with noise: an environment of one's own, and one that breaks where it is asked to."""

    Settings = WalkSettings
    settings: WalkSettings

    def __init__(self, settings: WalkSettings, task: str) -> None:
        super().__init__(settings, task)
        self.goal = 3.0 if task == "right" else -3.0
        self.place, self.noise = 0.0, np.random.default_rng(0)

    observation_spec = property(lambda self: {"state": ArraySpec(shape=(2,), dtype="float32")})
    action_spec = property(lambda self: ActionSpec(low=-np.ones(1, np.float32), high=np.ones(1, np.float32)))
    instruction = property(lambda self: f"go {self.task}")

    def reset(self, init_state: int, seed: int) -> None:
        self.place = float(np.random.default_rng(init_state).uniform(-1, 1))
        self.noise = np.random.default_rng((init_state, seed))

    def step(self, action: Array, *, is_read: bool) -> Step:
        self.place += float(action[0]) + 0.01 * float(self.noise.normal())
        if self.place > self.settings.fault_at:
            self.break_down()
        return Step(reward=-abs(self.goal - self.place), success=abs(self.goal - self.place) < 0.5)

    def break_down(self) -> None:
        match self.settings.fault:
            case "raise":
                raise RuntimeError("the wheel came off")
            case "nan":
                self.place = float("nan")
            case "exit":
                raise SystemExit(3)
            case "crash":
                ctypes.string_at(0)
            case "hang":
                time.sleep(1000)

    def observe(self) -> Observation:
        return {"state": np.array([self.place, self.goal], np.float32)}

    def save(self) -> object:
        return self.place, self.noise.bit_generator.state

    def load(self, state: object) -> None:
        self.place, self.noise.bit_generator.state = state  # type: ignore[misc]

    def expert_action(self) -> Array:
        return np.array([np.sign(self.goal - self.place)], np.float32)

    def render(self) -> np.ndarray:
        picture = np.zeros((8, 64, 3), np.uint8)
        picture[:, int(np.clip(32 + 8 * self.place, 0, 63))] = 255
        return picture


class WalkBatchSettings(WalkSettings, BatchSettings):
    """Settings of WalkBatch."""


class WalkBatch(BatchSimulator):
    """Points on a line that are stepped together, with numpy as the library of tensors."""

    Settings = WalkBatchSettings
    settings: WalkBatchSettings
    xp = np

    def __init__(self, settings: WalkBatchSettings, task: str, num_envs: int) -> None:
        super().__init__(settings, task, num_envs)
        self.goal = 3.0 if task == "right" else -3.0
        self.places = np.zeros(num_envs, np.float32)
        self.calls: list[tuple[str, int]] = []
        """Name of each call and number of its environments."""

    observation_spec = property(lambda self: {"state": ArraySpec(shape=(2,), dtype="float32")})
    action_spec = property(lambda self: ActionSpec(low=-np.ones(1, np.float32), high=np.ones(1, np.float32)))
    instruction = property(lambda self: f"go {self.task}")

    def to_device(self, array: Array) -> np.ndarray:
        return np.array(array)

    def to_host(self, array: np.ndarray) -> Array:
        return array

    def reset(self, mask: np.ndarray, starts: Mapping[int, Start]) -> None:
        self.calls.append(("reset", int(mask.sum())))
        for row, start in starts.items():
            self.places[row] = np.random.default_rng(start.init_state).uniform(-1, 1)

    def step(self, actions: np.ndarray, mask: np.ndarray) -> BatchStep:
        self.calls.append(("step", int(mask.sum())))
        self.places = np.where(mask, self.places + actions[:, 0], self.places)
        beyond = mask & (self.places > self.settings.fault_at)
        if self.settings.fault == "raise" and beyond.any():
            raise RuntimeError("the wheel came off")
        if self.settings.fault == "nan":
            self.places[beyond] = np.nan
        none, distance = np.zeros(self.num_envs, np.bool_), np.abs(self.goal - self.places)
        return BatchStep(reward=-distance, terminated=none, truncated=none, success=distance < 0.5)

    def observe(self, mask: np.ndarray) -> Mapping[str, np.ndarray]:
        self.calls.append(("observe", int(mask.sum())))
        return {"state": np.stack([self.places, np.full_like(self.places, self.goal)], axis=-1)}

    def save(self, rows: Sequence[int]) -> list[object]:
        return [float(self.places[row]) for row in rows]

    def load(self, states: Mapping[int, object]) -> None:
        for row, state in states.items():
            self.places[row] = state


class HeavyInProcess(ABCMeta):
    """Memory of simulators: none in the run's process, and a third of the free memory in a simulating process."""

    @property
    def memory_bytes(cls) -> int:
        return load.available_bytes() // 3 if multiprocessing.parent_process() else 0


class HeavyWalk(Walk, metaclass=HeavyInProcess):
    """Walk for which a process has enough memory for two simulators."""


class WalksTogether(VectorEnv):
    """Walks that are stepped at once, as in a simulator that steps many environments in one call."""

    Settings = WalkSettings

    def __init__(self, settings: WalkSettings, num_envs: int) -> None:
        super().__init__(settings, num_envs)
        self.walks = SimulatedEnvs(Walk, settings, num_envs)
        self.spec = self.walks.spec
        for name in ("reset", "observe", "get_state", "set_state", "render", "expert_actions", "offload", "onload"):
            setattr(self, name, getattr(self.walks, name))

    def chunk_step(self, actions: Array, slots: Sequence[int] | None = None) -> ChunkResult:
        """Refuses to step an environment twice, as its two chunks would be one."""
        assert slots is None or len(set(slots)) == len(slots), f"{slots} repeats an environment"
        return self.walks.chunk_step(actions, slots)

    def close(self) -> None:
        self.walks.close()

    # The abstract methods, which each environment delegates.
    reset = observe = get_state = set_state = render = expert_actions = offload = onload = close
