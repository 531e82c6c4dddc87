"""Any environment that is registered with gymnasium, by its id (`pip install 'interlace[robots]'`).

A task is an id such as `CartPole-v1` or `Pendulum-v1`; the form `my_module:Name-v0` imports a module of the current
folder first. Actions are bounded numbers (Box), or one of several choices (Discrete). A picture becomes the observation
`image`, any other observation is flattened into `state`; `image_size` adds a drawn `image`. An episode succeeds if
the environment's info has a true `success` or `is_success`.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.robots.envs.base import EnvSettings, RetracedSimulator, Step, import_required
from interlace.rollouts.envs.spec import ActionSpec, Array, ArraySpec, Observation

_STATELESS_WRAPPERS = ("OrderEnforcing", "PassiveEnvChecker")
"""Wrappers whose state affects no observation or reward."""
_OF_DRAWING = ("screen", "clock", "surf", "isopen", "last_u", "window", "viewer")
"""Attributes of classic environments that only drawing uses and that cannot be pickled."""
_FIXED = (*_OF_DRAWING, "observation_space", "action_space", "spec", "metadata", "render_mode", "_np_random_seed")
"""Attributes that are no part of a state."""
_NUM_FRAMES = 3
"""Pictures in an image of `motion`."""
_PLAIN = (np.ndarray, np.generic, np.random.Generator, float, int, bool, str, tuple, list, dict, type(None))


class GymnasiumSettings(EnvSettings):
    """Settings of gymnasium's environments. `horizon` replaces the registered limit of an id."""

    tasks: tuple[str, ...] = ("CartPole-v1",)
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of gymnasium.make, in addition to the id."""
    image_size: int = Field(default=0, ge=0)
    """Side of the observation `image`, which the environment's renderer draws, in pixels. If 0, nothing is drawn."""
    image_box: tuple[int, int, int, int] | None = None
    """Left, top, right and lower edge of the part of the drawn picture that `image` shows, in pixels. If None, all."""
    image_channels: Literal["color", "motion"] = "color"
    """color: red, green and blue of the current picture. motion: the pictures after the last three actions in grey, the
    current one last, so that one observation shows velocities; each action is drawn."""

    @model_validator(mode="after")
    def _check_image_settings(self) -> Self:
        box = self.image_box
        if not self.image_size and (box is not None or self.image_channels != "color"):
            raise ValueError("image_box and image_channels have no effect without pictures: set image_size")
        if box is not None and not (0 <= box[0] < box[2] and 0 <= box[1] < box[3]):
            raise ValueError(f"image_box={list(box)} is left, top, right, lower: make right > left and lower > top")
        return self


class GymnasiumEnv(RetracedSimulator):
    """One registered environment.

    Its state is its attributes if they are plain data and no wrapper has a state, as in classic control. Otherwise its
    state is its start and its actions, which load() repeats; this includes the state of wrappers such as a frame stack
    or a time limit. The first save after an action checks with a second environment that repeating gives the same
    observation.
    """

    Settings = GymnasiumSettings
    settings: GymnasiumSettings
    memory_bytes = 8 << 10  # classic control; other environments need more

    def __init__(self, settings: GymnasiumSettings, task: str) -> None:
        """Raises UserError for an id that cannot be made, and for pictures that cannot be drawn."""
        super().__init__(settings, task)
        self._library = import_required("gymnasium", family="gymnasium", extra="robots")
        self._spaces = self._library.spaces
        here = str(Path.cwd())
        if ":" in task and here not in sys.path:
            sys.path.insert(0, here)
        self._env: Any = self._make_environment()
        self._observed: Any = None
        self._is_repeatable = False
        """True after a save has checked that the same actions, at least one, give the same observation."""
        self._frames: list[NDArray[np.uint8]] = []
        """[side, side] grey pictures of `motion`, the current one last."""
        if settings.image_size:
            self._check_pictures()

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        space, size = self._env.observation_space, self.settings.image_size
        if _is_picture(space):
            return {"image": ArraySpec(shape=tuple(space.shape), dtype="uint8")}
        drawn = {"image": ArraySpec(shape=(size, size, 3), dtype="uint8")} if size else {}
        return {"state": ArraySpec(shape=(self._spaces.flatdim(space),), dtype="float32"), **drawn}

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
        self._frames = []
        self._draw_frame()

    def act(self, action: Array) -> Step:
        space = self._env.action_space
        if isinstance(space, self._spaces.Discrete):
            given: Any = int(action[0]) + int(space.start)
        else:
            given = np.asarray(action, space.dtype).reshape(space.shape)
        self._observed, reward, terminated, truncated, info = self._env.step(given)
        success = bool(info.get("success", info.get("is_success", False)))
        if len(self.actions) % self.settings.action_repeat == 0 or terminated or truncated or success:
            self._draw_frame()
        return Step(reward=float(reward), terminated=bool(terminated), truncated=bool(truncated), success=success)

    def observe(self) -> Observation:
        """Returns the picture, or the flattened state and the drawn picture."""
        space = self._env.observation_space
        if _is_picture(space):
            return {"image": np.array(self._observed)}
        found: dict[str, Array] = {"state": np.asarray(self._spaces.flatten(space, self._observed), np.float32).copy()}
        if self.settings.image_size:
            found["image"] = np.stack(self._frames, axis=-1) if self._frames else self._draw_picture("RGB")
        return found

    def save(self) -> object:
        """Returns the attributes, or start and actions, and the drawn frames. Raises UserError if neither determines
        the state.
        """
        own = {name: value for name, value in vars(self._env.unwrapped).items() if name not in _FIXED}
        if not self._has_wrappers() and all(isinstance(value, _PLAIN) for value in own.values()):
            return pickle.dumps((self._observed, self.start, self.actions, own)), self._frames
        if not self._is_repeatable:
            self._check_repeatable()
        return super().save(), self._frames

    def load(self, state: object) -> None:
        saved: Any = state
        determined, frames = saved
        if isinstance(determined, bytes):
            observed, start, actions, own = pickle.loads(determined)
            self.reset(*start)
            vars(self._env.unwrapped).update(own)
            self._observed, self.actions = observed, actions
        else:
            super().load(determined)
        self._frames = frames

    def render(self) -> NDArray[np.uint8]:
        """Draws the environment. Raises UserError if its renderer fails."""
        try:
            self._env.unwrapped.render_mode = "rgb_array"
            return np.array(self._env.unwrapped.render(), np.uint8)
        except Exception as error:  # an environment's renderer can raise anything, and drawing is optional
            raise UserError(f"gymnasium cannot draw {self.task!r} here: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._env.close()

    def _make_environment(self) -> Any:
        library = self._library
        arguments = self.settings.arguments
        try:
            return library.make(self.task, max_episode_steps=-1, disable_env_checker=True, **arguments)
        except (library.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(f"gymnasium cannot make {self.task!r}: {error}") from error

    def _check_pictures(self) -> None:
        """Raises UserError if the environment's observation is a picture already, or if nothing can be drawn."""
        if _is_picture(self._env.observation_space):
            raise UserError(
                f"{self.task!r} observes pictures, and env.settings.image_size={self.settings.image_size} draws "
                "others. Set image_size=0."
            )
        self._env.reset(seed=0)
        height, width = self.render().shape[:2]
        box = self.settings.image_box
        if box is not None and (box[2] > width or box[3] > height):
            raise UserError(
                f"env.settings.image_box={list(box)} is outside the picture of {self.task!r}, which is {width} pixels "
                f"wide and {height} high. Make it smaller."
            )

    def _draw_picture(self, mode: str) -> NDArray[np.uint8]:
        """Draws the part of the picture that `image` shows: [side, side, 3] for mode RGB, [side, side] for L (grey)."""
        images = import_required("PIL.Image", family="gymnasium", extra="robots")
        side = self.settings.image_size
        drawn = images.fromarray(self.render()).convert(mode)
        # Area means keep lines that are thinner than a pixel.
        return np.array(drawn.resize((side, side), images.Resampling.BOX, box=self.settings.image_box), np.uint8)

    def _draw_frame(self) -> None:
        """Draws the current picture, if `image` shows the last ones. The first picture counts as its own past."""
        if self.settings.image_size and self.settings.image_channels == "motion":
            frame = self._draw_picture("L")
            self._frames = [*(self._frames or [frame] * _NUM_FRAMES), frame][-_NUM_FRAMES:]

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
            second.load(((self.start, list(self.actions)), self._frames))
            mine, its = self.observe(), second.observe()
        finally:
            second.close()
        if any(not np.array_equal(mine[name], its[name], equal_nan=True) for name in mine):
            raise UserError(
                f"{self.task!r} cannot save its state: the same start and actions gave another observation, so its "
                "randomness does not come from np_random. Draw from self.np_random in the environment, or keep its "
                "simulators on the host (schedule.placement.env=host), where no state is saved."
            )
        self._is_repeatable = bool(self.actions)  # a start without actions shows nothing of the steps' randomness


def _is_picture(space: Any) -> bool:
    return getattr(space, "dtype", None) == np.uint8 and len(space.shape) == 3
