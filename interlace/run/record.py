"""Records demonstrations of a recipe's simulators as a data set."""

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.robots.datasets.layout import check_size
from interlace.robots.datasets.lerobot_write import LeRobotWriter
from interlace.robots.datasets.replace import is_recorded
from interlace.robots.envs.fleet import read_spec
from interlace.robots.envs.load import check_memory
from interlace.robots.episodes.robot import RobotConfig
from interlace.robots.experts import ExpertConfig, first_of_each_instruction, record_demonstrations
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import recipe_prompts, with_instructions


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Counts of a recorded data set."""

    num_episodes: int
    num_steps: int
    num_successes: int


def record(
    recipe: Recipe, folder: Path, settings: ExpertConfig, *, fps: float, video: bool, overwrite: bool = False
) -> Recording:
    """Records demonstrations of the scripted expert into a new LeRobotDataset (v3).

    fps: frames per second that the data set states; simulators have no rate. video: pictures as videos instead of PNG.
    overwrite: replaces an earlier data set in the folder, once all episodes are recorded. Raises UserError if the
    recipe has no simulator, the simulator no expert, the options do not fit the simulator, or the folder is not
    replaced.
    """
    episode = recipe.episode
    if not isinstance(episode, RobotConfig):
        raise UserError(
            f"episode {episode.name!r} has no simulator, so there is nothing to record. Name a recipe of a robot."
        )
    if not math.isfinite(fps):
        raise UserError(f"fps={fps}: the rate must be a finite number of frames per second. Give one, such as 10.")
    if is_recorded(folder) and not overwrite:
        raise UserError(f"{folder} contains a data set already. Replace it (--overwrite), or name a new folder.")
    check_memory(episode.env)
    if video:
        for array in read_spec(episode.env).observation.values():
            if len(array.shape) == 3:
                check_size((array.shape[0], array.shape[1]))
    writer = LeRobotWriter(folder, fps=fps, robot_type=episode.env.family, video=video, overwrite=overwrite)
    prompts = first_of_each_instruction(with_instructions(recipe, recipe_prompts(recipe).train))
    found = asyncio.run(record_demonstrations(settings, episode.env, prompts, recipe.seed))
    for _, each in found:
        writer.add(each)
    writer.finish()
    return Recording(
        num_episodes=len(found),
        num_steps=sum(len(each) for _, each in found),
        num_successes=sum(bool(each.success) for _, each in found),
    )
