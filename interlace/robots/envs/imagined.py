"""Imagined environments: a world model replaces the simulator, with the interface of any other environment.

The state changes once per chunk of the length that the model was fitted with, and is constant in between; a chunk in
parts has the same result. An episode is truncated when the members of the ensemble disagree too much.
"""

from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.published import newest_model
from interlace.robots.envs.base import Simulator, Step
from interlace.robots.envs.spec import EnvSettings
from interlace.robots.world_model.model import WorldModel, load_world_model
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation


class ImaginedSettings(EnvSettings):
    """Settings of an imagined environment."""

    model: str
    """Folder of a world model, or of a run's published models; then each reset uses the newest."""
    max_disagreement: float = 0.5
    """Spread between the ensemble's members that ends an episode, in units of a chunk's typical change of the state."""


class Imagined(Simulator):
    """World model as a simulator. The initial states are stored with the model; higher ids wrap around."""

    Settings = ImaginedSettings
    swaps = True
    keeps_starts = False

    settings: ImaginedSettings

    def __init__(self, settings: ImaginedSettings, task: str) -> None:
        """Raises UserError if the model does not exist, or has no initial states."""
        super().__init__(settings, task)
        self._newest = newest_model(Path(settings.model))
        self._model, self._starts = self._read_model()
        self._state: FloatArray = self._starts[0]
        self._waiting: list[FloatArray] = []
        """Actions of the incomplete chunk."""

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Spec of `state`."""
        return {"state": ArraySpec(shape=(self._model.config.state_size,), dtype="float32")}

    @property
    def action_spec(self) -> ActionSpec:
        """Bounds -1 ... 1."""
        ones = np.ones(self._model.config.action_size, np.float32)
        return ActionSpec(low=-ones, high=ones)

    def reset(self, init_state: int, seed: int) -> None:  # noqa: ARG002 - the ensemble's mean has no noise
        """Starts in a real state, with the newest model."""
        if (newest := newest_model(Path(self.settings.model))) != self._newest:
            self._newest = newest
            self._model, self._starts = self._read_model()
        self._state, self._waiting = self._starts[init_state % len(self._starts)], []

    def step(self, action: Array, *, is_read: bool) -> Step:  # noqa: ARG002 - a chunk is one prediction anyway
        """Collects actions until a chunk is complete, then predicts its result."""
        self._waiting.append(np.asarray(action, np.float32))
        if len(self._waiting) < self._model.config.chunk:
            return Step()
        chunk, self._waiting = np.concatenate(self._waiting), []
        found = self._model.predict(self._state[None], chunk[None])
        self._state = found.next_states[0]
        return Step(
            reward=float(found.rewards[0]),
            success=bool(found.successes[0] > 0.5),
            truncated=bool(found.disagreement[0] > self.settings.max_disagreement),
        )

    def _read_model(self) -> tuple[WorldModel, FloatArray]:
        model, starts = load_world_model(Path(self.settings.model))
        if not len(starts):
            raise UserError(f"the world model {self.settings.model} has no states to begin in")
        return model, starts

    def observe(self) -> Observation:
        """Returns the state."""
        return {"state": self._state.copy()}

    def save(self) -> object:
        """Returns the state."""
        return self._state, list(self._waiting)

    def load(self, state: object) -> None:
        """Restores a result of save()."""
        saved: Any = state
        self._state, waiting = saved
        self._waiting = list(waiting)
