"""Tasks of benchmarks/control.py, and the environment that Stable-Baselines3 gets for MetaWorld."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from interlace.robots.envs.load import EnvConfig, create_envs

NUM_STARTS = 1024
"""Initial states from which an episode of SAC draws on both sides, unless gymnasium draws it for Stable-Baselines3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A task, and the settings of both for it."""

    task: str
    recipe: str
    steps: int
    """Simulated steps."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe."""
    theirs: Mapping[str, object]
    """Arguments of Stable-Baselines3's algorithm that its zoo sets."""
    algorithm: Literal["PPO", "SAC"] = "PPO"
    num_envs: int = 4
    """Environments of Stable-Baselines3."""
    simulator: Mapping[str, object] = field(default_factory=dict)
    """Section `episode.env` for a task that gymnasium does not register; both then run interlace's simulator."""
    reward_scale: float = 1.0
    """Factor of the rewards that Stable-Baselines3 gets from this simulator."""


def _describe_env(env: Mapping[str, object]) -> str:
    return f"episode.env={json.dumps(env)}"


HOPPER = {"family": "gymnasium", "num_envs": 4, "workers": 1, "settings": {"tasks": ["Hopper-v5"], "horizon": 1000}}
REACH = {
    "family": "metaworld",
    "num_envs": 2,
    "workers": 1,
    "settings": {"tasks": ["reach-v3"], "horizon": 100, "reward": "dense", "end_on_success": False},
}
_STARTS = f"task.starts.train_size={NUM_STARTS}"
"""Override that makes few starts, because each is encoded at the start of the run. Later episodes repeat them."""
_BATCHED = "schedule.granularity.env=100%"
"""Override by which the episodes of a step share each forward pass. It changes the CPU time, not the result."""
TASKS = {
    "cartpole": Control(
        task="CartPole-v1",
        recipe="robot-cartpole",
        steps=15_000,
        overrides=("epochs=10", "algorithm.gamma=0.98", "algorithm.lam=0.8"),
        theirs={
            "n_steps": 256, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3,
        },
    ),
    "pendulum": Control(
        task="Pendulum-v1",
        recipe="robot-pendulum",
        steps=20_000,
        theirs={"n_steps": 1024, "gamma": 0.9, "use_sde": True, "sde_sample_freq": 4, "learning_rate": 1e-3},
    ),
    "pendulum-sac": Control(
        task="Pendulum-v1",
        recipe="robot-sac",
        steps=10_000,
        overrides=(_STARTS,),
        theirs={"learning_rate": 1e-3},
        algorithm="SAC",
        num_envs=1,
    ),
    "hopper-sac": Control(
        task="Hopper-v5",
        recipe="robot-sac",
        steps=25_000,
        overrides=(
            _STARTS,
            _describe_env(HOPPER),
            "episode.features=[]",
            "prompts_per_step=4",
            "model.robot.state_size=11",
            "model.robot.action_size=3",
            "model.robot.low=[-1.0, -1.0, -1.0]",
            "model.robot.high=[1.0, 1.0, 1.0]",
            "task.starts.instructions=[hop forward]",
            "episode.reward_scale=1.0",
            "episode.max_turns=1000",
            "sampling.max_new_tokens=3",
            "replay.capacity=20000",
            "algorithm.start_turns=10000",
            _BATCHED,
            "model.robot.output_initializer_range=0",
        ),
        theirs={"learning_starts": 10_000},
        algorithm="SAC",
        num_envs=1,
    ),
    "reach-sac": Control(
        task="MetaWorld's reach-v3",
        recipe="robot-sac",
        steps=15_000,
        overrides=(
            _STARTS,
            _describe_env(REACH),
            "episode.features=[]",
            "prompts_per_step=2",
            "model.robot.state_size=39",
            "model.robot.action_size=4",
            "model.robot.low=[-1.0, -1.0, -1.0, -1.0]",
            "model.robot.high=[1.0, 1.0, 1.0, 1.0]",
            "task.starts.instructions=[reach the goal]",
            "episode.reward_scale=0.1",
            "episode.max_turns=100",
            "sampling.max_new_tokens=4",
            _BATCHED,
        ),
        theirs={},
        algorithm="SAC",
        num_envs=1,
        simulator=REACH,
        reward_scale=0.1,
    ),
}  # fmt: skip


class SimulatorEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """One of interlace's simulators as an environment of gymnasium."""

    def __init__(self, simulator: Mapping[str, object], reward_scale: float) -> None:
        """simulator: a section `episode.env`."""
        config = EnvConfig.parse(simulator)
        self._envs, self._scale = create_envs(config.family, config.settings, 1), reward_scale
        spec, infinity = self._envs.spec, np.inf
        self.observation_space = gymnasium.spaces.Box(-infinity, infinity, spec.observation["state"].shape, np.float32)
        self.action_space = gymnasium.spaces.Box(spec.action.low, spec.action.high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draws an initial state, and starts an episode."""
        super().reset(seed=seed, options=options)
        start = int(self.np_random.integers(NUM_STARTS))
        found = self._envs.reset(seeds=[0], task_ids=[0], init_state_ids=[start])
        return found["state"][0], {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Executes an action."""
        done = self._envs.chunk_step(np.asarray(action)[None, None])
        terminated, truncated = bool(done.terminated.any()), bool(done.truncated.any())
        return done.observation["state"][0], float(done.reward.sum()) * self._scale, terminated, truncated, {}
