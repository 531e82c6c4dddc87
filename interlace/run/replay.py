"""Opens the replay buffer of a run, and the world model that is trained on it."""

import shutil
from pathlib import Path
from typing import cast

from interlace.algorithms.sac import SAC
from interlace.flows.run import RoleGroups
from interlace.robots.episodes.robot import RobotConfig, policy_actions
from interlace.robots.replay.buffer import Replay
from interlace.robots.replay.learning import Learning
from interlace.robots.replay.off_policy import OffPolicy
from interlace.robots.world_model.flow import WorldLearning, WorldModelGroup
from interlace.run.host import policy_actions_of
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.saving import REPLAY_FOLDER, WORLD_MODEL_FOLDER


def open_learning(recipe: Recipe, folder: Path, newest: Path | None, groups: RoleGroups) -> Learning | None:
    """Opens the replay buffer in the state of the checkpoint `newest`. Returns None if the recipe has no replay.

    folder: the run's folder.
    """
    if recipe.replay is None:
        return None
    replay = Replay(recipe.replay, folder / REPLAY_FOLDER, seed=recipe.seed)
    if newest:
        replay.restore(newest / REPLAY_FOLDER)
    off_policy = _off_policy(recipe)
    return Learning(
        replay=replay, config=recipe.replay, world=_world(recipe, folder, newest, groups), off_policy=off_policy
    )


def _off_policy(recipe: Recipe) -> OffPolicy | None:
    algorithm = algorithm_of(recipe)
    return OffPolicy(settings=algorithm.settings, seed=recipe.seed) if isinstance(algorithm, SAC) else None


def _world(recipe: Recipe, folder: Path, newest: Path | None, groups: RoleGroups) -> WorldLearning | None:
    if recipe.world_model is None:
        return None
    published = folder / WORLD_MODEL_FOLDER
    shutil.rmtree(published, ignore_errors=True)
    if newest and (kept := newest / REPLAY_FOLDER / WORLD_MODEL_FOLDER).is_dir():
        shutil.copytree(kept, published)
    actions = policy_actions(policy_actions_of(recipe))
    return WorldLearning(
        group=cast(WorldModelGroup, groups.others["world_model"][0]),
        settings=recipe.world_model,
        folder=published,
        decode=actions.decode,
        action_size=actions.size,
    )


def imagining(recipe: Recipe, folder: Path) -> Recipe:
    """Returns a recipe whose imagined episodes read the world models that the run in `folder` publishes."""
    episode = recipe.episode
    if not isinstance(episode, RobotConfig) or episode.imagined is None:
        return recipe
    imagined = episode.imagined.model_copy(update={"published_in": str((folder / WORLD_MODEL_FOLDER).resolve())})
    return recipe.model_copy(update={"episode": episode.model_copy(update={"imagined": imagined})})
