"""Any environment that is registered with gymnasium, by its id (`pip install 'interlace[robots]'`).

A task is an id such as `CartPole-v1` or `Pendulum-v1`. Actions are numbers between bounds (Box), or one of several
(Discrete). An observation that is a picture becomes `image`, any other is flattened into `state`. Success is what the
environment's info calls `success` or `is_success`.
"""

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.envs.base import RetracedSimulator, Step, required
from interlace.envs.spec import ActionSpec, Array, ArraySpec, EnvSettings, Observation

_OF_DRAWING = ("screen", "clock", "surf", "isopen", "last_u", "window", "viewer")
"""Attributes of classic environments that only drawing uses, and that cannot be pickled."""
_PLAIN = (np.ndarray, np.generic, np.random.Generator, float, int, bool, str, tuple, list, dict, type(None))


class GymnasiumSettings(EnvSettings):
    """Settings of gymnasium's environments. The limit that an id is registered with gives way to `horizon`."""

    tasks: tuple[str, ...] = ("CartPole-v1",)
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of gymnasium.make, beside the id."""


class GymnasiumEnv(RetracedSimulator):
    """One registered environment.

    Its state is its attributes where these are plain data, as in classic control; else the way to it.
    """

    Settings = GymnasiumSettings
    settings: GymnasiumSettings
    memory_bytes = 8 << 10  # of classic control; others take more

    def __init__(self, settings: GymnasiumSettings, task: str) -> None:
        """Raises UserError for an id that cannot be made, and for spaces that have no place here."""
        super().__init__(settings, task)
        library = required("gymnasium", family="gymnasium", extra="robots")
        self._spaces = library.spaces
        try:
            self._env: Any = library.make(task, max_episode_steps=-1, disable_env_checker=True, **settings.arguments)
        except (library.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(f"gymnasium cannot make {task!r}: {error}") from error
        self._observed: Any = None

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """`image` or `state`."""
        space = self._env.observation_space
        if _is_picture(space):
            return {"image": ArraySpec(shape=tuple(space.shape), dtype="uint8")}
        return {"state": ArraySpec(shape=(self._spaces.flatdim(space),), dtype="float32")}

    @property
    def action_spec(self) -> ActionSpec:
        """Bounds of a Box, or the choices of a Discrete. Raises UserError for any other space."""
        space = self._env.action_space
        if isinstance(space, self._spaces.Discrete):
            low = np.zeros(1, np.float32)
            return ActionSpec(low=low, high=low + np.float32(space.n - 1), num_choices=int(space.n))
        if isinstance(space, self._spaces.Box):
            return ActionSpec(
                low=np.asarray(space.low, np.float32).reshape(-1), high=np.asarray(space.high, np.float32).reshape(-1)
            )
        raise UserError(f"{self.task}: its actions are {space}; they must be a Box or a Discrete")

    def begin(self, init_state: int, seed: int) -> None:
        """Begins in the state that gymnasium draws with the id as its seed."""
        self._observed, _ = self._env.reset(seed=init_state)
        self._env.unwrapped.np_random = np.random.default_rng(stable_hash("env noise", init_state, seed))

    def act(self, action: Array) -> Step:
        """Takes a step."""
        space = self._env.action_space
        if isinstance(space, self._spaces.Discrete):
            given: Any = int(action[0]) + int(space.start)
        else:
            given = np.asarray(action, space.dtype).reshape(space.shape)
        self._observed, reward, terminated, truncated, info = self._env.step(given)
        success = bool(info.get("success", info.get("is_success", False)))
        return Step(reward=float(reward), terminated=bool(terminated), truncated=bool(truncated), success=success)

    def observe(self) -> Observation:
        """Returns the picture or the flattened state."""
        space = self._env.observation_space
        if _is_picture(space):
            return {"image": np.array(self._observed)}
        return {"state": np.asarray(self._spaces.flatten(space, self._observed), np.float32).copy()}

    def save(self) -> object:
        """Returns the attributes, or the way here."""
        own = {name: value for name, value in vars(self._env.unwrapped).items() if name not in self._fixed()}
        if not all(isinstance(value, _PLAIN) for value in own.values()):
            return super().save()
        return pickle.dumps((self._observed, self.start, self.actions, own))

    def load(self, state: object) -> None:
        """Takes the attributes over, or goes the way again."""
        if not isinstance(state, bytes):
            super().load(state)
            return
        observed, start, actions, own = pickle.loads(state)
        self.reset(*start)
        vars(self._env.unwrapped).update(own)
        self._observed, self.actions = observed, actions

    def render(self) -> NDArray[np.uint8]:
        """Draws it. Raises UserError where its own renderer cannot."""
        library = required("gymnasium", family="gymnasium", extra="robots")
        try:
            self._env.unwrapped.render_mode = "rgb_array"
            return np.array(self._env.unwrapped.render(), np.uint8)
        except (library.error.Error, ImportError, AttributeError, TypeError) as error:
            raise UserError(f"gymnasium cannot draw {self.task!r} here: {error}") from error

    def close(self) -> None:
        """Closes it."""
        self._env.close()

    def _fixed(self) -> tuple[str, ...]:
        return (*_OF_DRAWING, "observation_space", "action_space", "spec", "metadata", "render_mode", "_np_random_seed")


def _is_picture(space: Any) -> bool:
    return getattr(space, "dtype", None) == np.uint8 and len(space.shape) == 3
