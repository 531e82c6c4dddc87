"""Any environment that is registered with gymnasium, by its id (`pip install 'interlace[robots]'`).

A task is an id such as `CartPole-v1` or `Pendulum-v1`; the form `my_module:Name-v0` imports a module of the current
folder first. Actions are bounded numbers (Box), or one of several choices (Discrete). A picture becomes the observation
`image`, any other observation is flattened into `state`. An episode succeeds if the environment's info has a true
`success` or `is_success`.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.robots.envs.base import RetracedSimulator, Step, import_required
from interlace.robots.envs.spec import EnvSettings
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

_STATELESS_WRAPPERS = ("OrderEnforcing", "PassiveEnvChecker")
"""Wrappers whose state affects no observation or reward."""
_OF_DRAWING = ("screen", "clock", "surf", "isopen", "last_u", "window", "viewer")
"""Attributes of classic environments that only drawing uses and that cannot be pickled."""
_FIXED = (*_OF_DRAWING, "observation_space", "action_space", "spec", "metadata", "render_mode", "_np_random_seed")
"""Attributes that are no part of a state."""
_PLAIN = (np.ndarray, np.generic, np.random.Generator, float, int, bool, str, tuple, list, dict, type(None))


class GymnasiumSettings(EnvSettings):
    """Settings of gymnasium's environments. `horizon` replaces the registered limit of an id."""

    tasks: tuple[str, ...] = ("CartPole-v1",)
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of gymnasium.make, in addition to the id."""


class GymnasiumEnv(RetracedSimulator):
    """One registered environment.

    Its state is its attributes if they are plain data and no wrapper has a state, as in classic control. Otherwise its
    state is its start and its actions, which load() repeats; this includes the state of wrappers such as a frame stack
    or a time limit. The first save checks with a second environment that repeating gives the same observation.
    """

    Settings = GymnasiumSettings
    settings: GymnasiumSettings
    memory_bytes = 8 << 10  # classic control; other environments need more

    def __init__(self, settings: GymnasiumSettings, task: str) -> None:
        """Raises UserError for an id that cannot be made."""
        super().__init__(settings, task)
        self._library = import_required("gymnasium", family="gymnasium", extra="robots")
        self._spaces = self._library.spaces
        here = str(Path.cwd())
        if ":" in task and here not in sys.path:
            sys.path.insert(0, here)
        self._env: Any = self._make_environment()
        self._observed: Any = None
        self._is_repeatable = False
        """True after the first save has checked that the same actions give the same observation."""

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Spec of `image` or `state`."""
        space = self._env.observation_space
        if _is_picture(space):
            return {"image": ArraySpec(shape=tuple(space.shape), dtype="uint8")}
        return {"state": ArraySpec(shape=(self._spaces.flatdim(space),), dtype="float32")}

    @property
    def action_spec(self) -> ActionSpec:
        """Bounds of a Box, or the number of choices of a Discrete. Raises UserError for any other space."""
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
        """Resets with the id as gymnasium's seed."""
        self._observed, _ = self._env.reset(seed=init_state)
        self._env.unwrapped.np_random = np.random.default_rng(stable_hash("env noise", init_state, seed))

    def act(self, action: Array) -> Step:
        """Executes one step."""
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
        """Returns the attributes, or start and actions. Raises UserError if neither determines the state."""
        own = {name: value for name, value in vars(self._env.unwrapped).items() if name not in _FIXED}
        if not self._has_wrappers() and all(isinstance(value, _PLAIN) for value in own.values()):
            return pickle.dumps((self._observed, self.start, self.actions, own))
        if not self._is_repeatable:
            self._check_repeatable()
        return super().save()

    def load(self, state: object) -> None:
        """Restores the attributes, or repeats the actions."""
        if not isinstance(state, bytes):
            super().load(state)
            return
        observed, start, actions, own = pickle.loads(state)
        self.reset(*start)
        vars(self._env.unwrapped).update(own)
        self._observed, self.actions = observed, actions

    def render(self) -> NDArray[np.uint8]:
        """Draws the environment. Raises UserError if its renderer fails."""
        try:
            self._env.unwrapped.render_mode = "rgb_array"
            return np.array(self._env.unwrapped.render(), np.uint8)
        except Exception as error:  # an environment's renderer can raise anything, and drawing is optional
            raise UserError(f"gymnasium cannot draw {self.task!r} here: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _make_environment(self) -> Any:
        library = self._library
        arguments = self.settings.arguments
        try:
            return library.make(self.task, max_episode_steps=-1, disable_env_checker=True, **arguments)
        except (library.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(f"gymnasium cannot make {self.task!r}: {error}") from error

    def _has_wrappers(self) -> bool:
        """Returns whether a wrapper may have a state, which the inner environment's attributes do not contain."""
        layer = self._env
        while layer is not self._env.unwrapped:
            if type(layer).__name__ not in _STATELESS_WRAPPERS:
                return True
            layer = layer.env
        return False

    def _check_repeatable(self) -> None:
        """Raises UserError if the same start and actions give another observation in a second environment."""
        second = type(self)(self.settings, self.task)
        try:
            second.load((self.start, list(self.actions)))
            mine, its = self.observe(), second.observe()
        finally:
            second.close()
        if any(not np.array_equal(mine[name], its[name], equal_nan=True) for name in mine):
            raise UserError(
                f"{self.task!r} cannot save its state: the same start and actions gave another observation, so its "
                "randomness does not come from np_random. Draw from self.np_random in the environment, or keep its "
                "simulators on the host (schedule.placement.env=host), where no state is saved."
            )
        self._is_repeatable = True


def _is_picture(space: Any) -> bool:
    return getattr(space, "dtype", None) == np.uint8 and len(space.shape) == 3
