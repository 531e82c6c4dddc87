"""Shapes of a run's simulators, stored with the run: its policy is served without the simulator's package."""

import json
from dataclasses import asdict

import numpy as np

from interlace.core.flat_settings import format_settings
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_folder import RunFolder
from interlace.robots.envs.fleet import read_spec
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import RobotConfig
from interlace.rollouts.envs.spec import ActionSpec, ArraySpec, EnvSpec
from interlace.run.recipe.config import Recipe


def store_spaces(recipe: Recipe, folder: RunFolder) -> None:
    """Writes the shapes of a robot's simulators into the folder of a run; other runs have none."""
    if not isinstance(recipe.episode, RobotConfig):
        return
    env = recipe.episode.env
    spec = read_spec(env)
    content = {
        "environment": _describe_family(env),
        "observation": {name: asdict(array) for name, array in spec.observation.items()},
        "low": spec.action.low.tolist(),
        "high": spec.action.high.tolist(),
        "num_choices": spec.action.num_choices,
        "tasks": spec.tasks,
        "instructions": spec.instructions,
        "horizon": spec.horizon,
    }
    write_atomic(folder.spaces, json.dumps(content) + "\n")


def read_spaces(env: EnvConfig, folder: RunFolder | None) -> EnvSpec:
    """Returns the shapes of a run's simulators; without a file of these simulators, reads them from a simulator.

    folder: of the run, or None for a recipe. Raises UserError as read_spec().
    """
    found = _read_stored(env, folder) if folder else None
    return found or read_spec(env)


def _read_stored(env: EnvConfig, folder: RunFolder) -> EnvSpec | None:
    """Returns the stored shapes. None if the file is missing or damaged, or of other settings."""
    try:
        content = json.loads(folder.spaces.read_text(encoding="utf-8"))
        if content["environment"] != _describe_family(env):
            return None
        arrays = content["observation"].items()
        return EnvSpec(
            observation={name: ArraySpec(shape=tuple(array["shape"]), dtype=array["dtype"]) for name, array in arrays},
            action=ActionSpec(
                low=np.array(content["low"], np.float32),
                high=np.array(content["high"], np.float32),
                num_choices=content["num_choices"],
            ),
            tasks=tuple(content["tasks"]),
            instructions=tuple(content["instructions"]),
            horizon=content["horizon"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _describe_family(env: EnvConfig) -> dict[str, str]:
    """Returns the settings that determine the shapes."""
    return format_settings(env.model_dump(mode="json", include={"family", "settings"}))
