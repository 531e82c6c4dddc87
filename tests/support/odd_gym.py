"""A gymnasium environment whose action is several choices at once, which no policy here supports."""

import gymnasium
import numpy as np


class Switches(gymnasium.Env):
    """Two switches."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


gymnasium.register("Switches-v0", Switches)
