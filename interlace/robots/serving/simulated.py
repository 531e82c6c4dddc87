"""A simulated robot: one environment of a family that is stepped once a tick, in place of hardware."""

from collections.abc import Mapping
from typing import Self

import numpy as np

from interlace.core.types import FloatArray
from interlace.robots.envs.base import select_row
from interlace.robots.envs.load import create_envs
from interlace.robots.serving.control import Tick
from interlace.rollouts.envs.spec import EnvSpec, Observation


class SimulatedRobot:
    """Robot whose body is a simulator."""

    def __init__(self, family: str, settings: Mapping[str, object]) -> None:
        """family, settings: see EnvConfig. Raises UserError for environments that cannot be created."""
        self._envs = create_envs(family, settings, 1)
        self._observed: Observation = {}

    @property
    def spec(self) -> EnvSpec:
        """Shapes and tasks."""
        return self._envs.spec

    def reset(self, init_state: int, task: int = 0) -> None:
        found = self._envs.reset(seeds=[0], task_ids=[task], init_state_ids=[init_state])
        self._observed = select_row(found, 0)

    def observe(self) -> Observation:
        return self._observed

    def act(self, action: FloatArray) -> Tick:
        done = self._envs.chunk_step(action[None, None])
        self._observed = select_row(done.observation, 0)
        return Tick(
            ended=bool(done.ended[0]),
            terminated=bool(done.terminated.any()),
            reward=float(done.reward.sum()),
            success=bool(done.success[0]),
        )

    def expert_action(self) -> FloatArray:
        """Returns a scripted expert's action for the current state, [A]. Raises UserError if the task has no expert."""
        return np.asarray(self._envs.expert_actions()[0, 0], np.float32)

    def close(self) -> None:
        self._envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
