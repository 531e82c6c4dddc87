"""Imagined environments: a world model replaces the simulator, with the interface of any other environment.

The state changes once per chunk of the length that the model was fitted with, and is constant in between; a chunk in
parts has the same result. An episode is truncated when the members of an ensemble disagree too much, and after the
number of chunks up to which the measured error of the model is within its bound.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.published import newest_model
from interlace.robots.envs.base import EnvSettings, Simulator, Step
from interlace.robots.world_model.imagination import ImaginationBounds, measured_horizon
from interlace.robots.world_model.load import load_world_model
from interlace.robots.world_model.model import WorldModel
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

_KEPT = 8
"""Models in memory: an episode that began before the newest publications still runs."""


class ImaginedSettings(EnvSettings, ImaginationBounds):
    """Settings of an imagined environment."""

    model: str
    """Folder of a world model, or of a run's published models; then each reset uses the newest."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OpenModel:
    """A world model in memory."""

    folder: Path | None
    """Folder of the published model; None for a model that no run publishes."""
    model: WorldModel
    starts: FloatArray
    """[starts, D] initial states."""
    limit: int
    """Largest number of chunks of an episode."""


class Imagined(Simulator):
    """World model as a simulator. The initial states are stored with the model; higher ids wrap around.

    An episode keeps the model that was the newest at its reset.
    """

    Settings = ImaginedSettings
    swaps = True
    keeps_starts = False
    settings: ImaginedSettings

    def __init__(self, settings: ImaginedSettings, task: str) -> None:
        """Raises UserError if the model does not exist, or has no initial states."""
        super().__init__(settings, task)
        self._open: OrderedDict[Path | None, _OpenModel] = OrderedDict()
        """Models of the running episodes, the least recently opened first."""
        self._used = self._open_model(newest_model(Path(settings.model)))
        self._state: FloatArray = self._used.starts[0]
        self._num_chunks = 0
        """Chunks since the reset."""
        self._waiting: list[FloatArray] = []
        """Actions of the incomplete chunk."""

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        return self._used.model.observation_spec

    @property
    def action_spec(self) -> ActionSpec:
        """Bounds that the model was made with; -1 to 1 if it has none."""
        config = self._used.model.config
        low, high = config.low or [-1.0] * config.action_size, config.high or [1.0] * config.action_size
        return ActionSpec(low=np.asarray(low, np.float32), high=np.asarray(high, np.float32))

    def reset(self, init_state: int, seed: int) -> None:  # noqa: ARG002 - a prediction has no noise
        """Starts in a real state, with the newest model."""
        self._used = self._open_model(newest_model(Path(self.settings.model)))
        starts = self._used.starts
        self._state, self._waiting, self._num_chunks = starts[init_state % len(starts)], [], 0

    def step(self, action: Array, *, is_read: bool) -> Step:  # noqa: ARG002 - a chunk is one prediction anyway
        """Collects actions until a chunk is complete, then predicts its result."""
        used = self._used
        self._waiting.append(np.asarray(action, np.float32))
        if len(self._waiting) < used.model.config.chunk:
            return Step()
        chunk, self._waiting = np.concatenate(self._waiting), []
        found = used.model.predict(self._state[None], chunk[None])
        self._state, self._num_chunks = found.next_states[0], self._num_chunks + 1
        bound, spread = self.settings.max_disagreement, found.disagreement
        disagrees = bound is not None and spread is not None and not spread[0] <= bound
        return Step(
            reward=float(found.rewards[0]),
            terminated=bool(found.ends[0] > 0.5),
            success=bool(found.successes[0] > 0.5),
            truncated=disagrees or self._num_chunks >= used.limit,
        )

    def observe(self) -> Observation:
        return {self._used.model.array: self._used.model.decode(self._state[None])[0]}

    def save(self) -> object:
        """Returns the model's folder and state, the incomplete chunk and the number of chunks."""
        return self._used.folder, self._state, list(self._waiting), self._num_chunks

    def load(self, state: object) -> None:
        saved: Any = state
        folder, self._state, waiting, self._num_chunks = saved
        self._used, self._waiting = self._open_model(folder), list(waiting)

    def _open_model(self, folder: Path | None) -> _OpenModel:
        """Opens a published model, or with None the only one."""
        if folder not in self._open:
            place = folder or Path(self.settings.model)
            model, starts = load_world_model(place)
            if not len(starts):
                raise UserError(f"the world model {self.settings.model} has no states to begin in")
            # The horizon of the environment limits an episode too.
            limit = measured_horizon(place, self.settings.max_error, self.settings.horizon)
            # A run requests no model without a measured error. If one is opened by hand, it predicts one chunk.
            self._open[folder] = _OpenModel(folder=folder, model=model, starts=starts, limit=max(1, limit))
            if len(self._open) > _KEPT:
                self._open.popitem(last=False)
        return self._open[folder]
