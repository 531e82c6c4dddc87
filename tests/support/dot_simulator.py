"""A user-defined simulator with a camera and an expert: a dot moves left or right to a mark."""

import os
from pathlib import Path

import numpy as np

from interlace.robots.envs.base import EnvSettings, Simulator, Step
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

SIDE = 42


class DotSettings(EnvSettings):
    """Settings of the dot simulator."""

    tasks: tuple[str, ...] = ("near", "far")
    faults: tuple[str, ...] = ()
    """Faults to cause: raise, exit. Each happens once, at the first action."""
    folder: str = ""
    """Folder that records faults that have happened, for all processes."""


class Dot(Simulator):
    """Simulator of the dot. Dot and mark are numbers from -1 to 1; the task `far` has more distant marks."""

    Settings = DotSettings
    settings: DotSettings
    swaps = True

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        return {
            "state": ArraySpec(shape=(2,), dtype="float32"),
            "image": ArraySpec(shape=(SIDE, SIDE, 3), dtype="uint8"),
        }

    @property
    def action_spec(self) -> ActionSpec:
        return ActionSpec(low=-np.ones(1, np.float32), high=np.ones(1, np.float32))

    @property
    def instruction(self) -> str:
        return f"push the puck {'up' if self.task == 'far' else 'down'}"

    def reset(self, init_state: int, seed: int) -> None:
        draw = np.random.default_rng(init_state)
        reach = 1.0 if self.task == "far" else 0.5
        self._at, self._mark = 0.0, float(draw.choice([-1, 1]) * draw.uniform(reach / 2, reach))

    def step(self, action: Array, *, is_read: bool) -> Step:
        for fault in self.settings.faults:
            self._fail_once(fault)
        self._at = float(np.clip(self._at + 0.2 * float(action[0]), -1, 1))
        gap = abs(self._at - self._mark)
        return Step(reward=-gap, success=gap < 0.08)

    def _fail_once(self, fault: str) -> None:
        note = Path(self.settings.folder) / fault
        if note.exists():
            return
        note.touch()
        if fault == "exit":
            os._exit(3)
        raise RuntimeError("the track is broken")

    def observe(self) -> Observation:
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for channel, place in ((0, self._at), (1, self._mark)):
            column = round((place + 1) / 2 * (SIDE - 4))
            image[:, column : column + 4, channel] = 255
        return {"state": np.array([self._at, self._mark], np.float32), "image": image}

    def save(self) -> object:
        return self._at, self._mark

    def load(self, state: object) -> None:
        self._at, self._mark = state  # type: ignore[misc]

    def expert_action(self) -> Array:
        return np.clip([(self._mark - self._at) / 0.2], -1, 1).astype(np.float32)


class OddDot(Dot):
    """The dot simulator with pictures of an odd width."""

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        return {**super().observation_spec, "image": ArraySpec(shape=(SIDE, SIDE + 1, 3), dtype="uint8")}

    def observe(self) -> Observation:
        found = super().observe()
        return {**found, "image": np.pad(found["image"], ((0, 0), (0, 1), (0, 0)))}
