"""A gymnasium environment whose state is not plain data."""

import gymnasium
import numpy as np


class Inside:
    """Something that cannot be told from outside."""

    def __init__(self) -> None:
        self.place = 0.0


class Odd(gymnasium.Env):
    """A point on a line, behind an object of its own."""

    observation_space = gymnasium.spaces.Dict(
        {"place": gymnasium.spaces.Box(-9, 9, (1,)), "side": gymnasium.spaces.Discrete(2)}
    )
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def __init__(self) -> None:
        self.inside = Inside()

    def see(self) -> dict:
        return {"place": np.array([self.inside.place], np.float32), "side": int(self.inside.place > 0)}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.inside.place = float(self.np_random.uniform(-1, 1))
        return self.see(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        self.inside.place += 0.3 * action + 0.01 * float(self.np_random.normal())
        return self.see(), -abs(self.inside.place), False, False, {"is_success": self.inside.place > 2}


gymnasium.register("Odd-v0", entry_point=Odd)
