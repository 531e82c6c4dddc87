"""Gymnasium environments whose state is not only in their attributes."""

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TimeLimit


class Drift(gymnasium.Env):
    """Environment with a number that changes by the action and by noise."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, *, honest: bool = True, render_mode: str | None = None) -> None:
        self._honest, self.render_mode = honest, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return np.array([self.place], np.float32), {}

    def step(self, action):
        noise = self.np_random.normal() if self._honest else np.random.normal()
        self.place += float(action[0]) + 0.1 * float(noise)
        return np.array([self.place], np.float32), self.place, False, False, {}


def stacked(**given):
    """Makes the environment with a frame stack and a time limit, both of which have a state."""
    return TimeLimit(FrameStackObservation(Drift(**given), 3), 6)


gymnasium.register("Stacked-v0", stacked)
gymnasium.register("Drift-v0", Drift)
