"""Opens the replay buffer of a run, and the world model that is trained on it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from interlace.algorithms.replayed import ReplayedAlgorithm, ReplayedSettings, WeightedSettings
from interlace.core.errors import UserError
from interlace.core.transitions import TransitionBatch, n_step_transitions
from interlace.core.types import FloatArray, IntArray, Prompt
from interlace.flows.run import RoleGroups
from interlace.models.action_tokens import ActionTokens
from interlace.robots.datasets.episodes import STATE, RecordedEpisode, chunk_steps, with_reward
from interlace.robots.datasets.load import open_dataset
from interlace.robots.envs.fleet import read_spec
from interlace.robots.episodes.robot import RobotConfig, RobotEpisode, policy_actions
from interlace.robots.replay.buffer import Replay
from interlace.robots.replay.learning import Learning
from interlace.robots.replay.off_policy import OffPolicy, Priorities
from interlace.robots.world_model.flow import WorldLearning, WorldModelGroup
from interlace.rollouts.envs.spec import Observation
from interlace.run.expert_examples import ExpertExamples, check_recorded_arrays, make_expert_examples
from interlace.run.host import policy_actions_of
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.prompts import recipe_prompts, with_instructions
from interlace.run.saving import REPLAY_FOLDER, WORLD_MODEL_FOLDER
from interlace.runtime.cluster import Cluster

ROUNDING = 1e-4
"""Share of half a policy's range by which a recorded action may exceed it."""


def open_learning(
    recipe: Recipe,
    folder: Path,
    newest: Path | None,
    groups: RoleGroups,
    demonstrations: ExpertExamples | None = None,
) -> Learning | None:
    """Opens the replay buffer in the state of the checkpoint `newest`. Returns None if the recipe has no replay.

    folder: the run's folder. demonstrations: as of make_demonstrations().
    """
    if recipe.replay is None:
        return None
    replay = Replay(recipe.replay, folder / REPLAY_FOLDER, seed=recipe.seed)
    if newest:
        replay.restore(newest / REPLAY_FOLDER)
    off_policy = _off_policy(recipe)
    if newest and off_policy and off_policy.priorities:
        off_policy.table.restore(newest / REPLAY_FOLDER)
    return Learning(
        replay=replay,
        config=recipe.replay,
        world=_open_world_model(recipe, folder, newest, groups),
        off_policy=off_policy,
        demonstrations=demonstrations,
    )


async def make_demonstrations(cluster: Cluster, recipe: Recipe, prompts: Sequence[Prompt]) -> ExpertExamples | None:
    """Records or reads the demonstrations that the recipe's replay imitates; a resumed run records the same again.

    prompts: training prompts of the recipe. Returns None if the replay imitates none.
    """
    replay = recipe.replay
    if replay is None or replay.experts is None:
        return None
    async with cluster.waiting("replay", "demonstrations"):
        return await make_expert_examples(recipe, prompts, "replay.experts", replay.experts, replay.draw_size)


def _off_policy(recipe: Recipe) -> OffPolicy | None:
    algorithm = algorithm_of(recipe)
    if not isinstance(algorithm, ReplayedAlgorithm):
        return None
    replay = recipe.replay
    rule = None
    if replay is not None and replay.order == "priority":
        rule = Priorities(exponent=replay.priority_exponent, importance=replay.importance_exponent)
    bounds = _read_bounds(recipe) if isinstance(algorithm.settings, WeightedSettings) else None
    found = OffPolicy(settings=algorithm.settings, seed=recipe.seed, priorities=rule, bounds=bounds)
    if replay is not None and replay.demonstrations is not None:
        prompt, actions = recipe_prompts(recipe).train[0], policy_actions(policy_actions_of(recipe))
        found.demonstrations = read_demonstrations(recipe, algorithm.settings)
        found.context_ids = np.asarray(actions.context(prompt.token_ids.tolist()), np.int32)
    return found


def _read_bounds(recipe: Recipe) -> tuple[FloatArray, FloatArray]:
    """Returns the bounds of the simulator's actions as numbers of a chunk of the policy, [C] each."""
    actions = policy_actions(policy_actions_of(recipe))
    assert isinstance(recipe.episode, RobotConfig)  # checked before the run
    spec = read_spec(recipe.episode.env).action
    return actions.scale_bounds(spec.low, spec.high)


def read_demonstrations(recipe: Recipe, settings: ReplayedSettings) -> TransitionBatch:
    """Reads the data set of `replay.demonstrations` as transitions of the recipe's policy. Raises UserError."""
    if recipe.replay is None or recipe.replay.demonstrations is None or not isinstance(recipe.episode, RobotConfig):
        raise ValueError("the recipe has no demonstrations of a robot")
    folder, episode = Path(recipe.replay.demonstrations), RobotEpisode(recipe.episode)
    actions = policy_actions(policy_actions_of(recipe))

    def read(observation: Observation) -> FloatArray:
        return np.asarray(episode.inputs(observation, actions)[STATE], np.float32).reshape(-1)

    def encode(chunk: FloatArray) -> FloatArray:
        return actions.encode(chunk).view(np.float32)

    parts = []
    [prompt] = with_instructions(recipe, recipe_prompts(recipe).train[:1])
    for recorded in _list_episodes(folder, prompt.text):
        check_recorded_arrays(
            f"replay.demonstrations={folder}",
            recorded.observation(0),
            recorded.actions.shape[1],
            recipe.episode,
            actions,
        )
        _check_range(f"replay.demonstrations={folder}", recorded.actions, recipe.episode, actions)
        steps = chunk_steps(
            with_reward(recorded, recipe.episode.reward), actions.chunk, read, encode, _find_scale(recipe)
        )
        parts += [n_step_transitions(each, n=settings.n_step, gamma=settings.gamma) for each in steps]
    if not parts:
        raise UserError(f"replay.demonstrations={folder} has no episode of {actions.chunk} steps or more. Record some.")
    return TransitionBatch.joined(parts)


def _check_range(setting: str, recorded: FloatArray, config: RobotConfig, actions: ActionTokens) -> None:
    """Raises UserError if the policy cannot give a recorded action: the critics would learn another one in its place.

    setting: key and value of the data set. recorded: [T, A] actions, which the simulator clips to its bounds.
    """
    bounds = read_spec(config.env).action
    executed = np.clip(recorded, bounds.low, bounds.high)
    low, high = actions.scale_bounds(executed.min(0), executed.max(0))
    if low.min() < -1 - ROUNDING or high.max() > 1 + ROUNDING:
        least, largest = executed.min(0), executed.max(0)
        # A simulator without a bound gives no range: the new one then contains the policy's and the recorded actions.
        own_low, own_high = (actions.low, actions.high) if actions.embodiment is None else (least, largest)
        new_low = np.where(np.isfinite(bounds.low), bounds.low, np.minimum(least, own_low))
        new_high = np.where(np.isfinite(bounds.high), bounds.high, np.maximum(largest, own_high))
        raise UserError(
            f"{setting} has actions from {least.tolist()} to {largest.tolist()}, and the policy gives "
            f"{actions.low.tolist()} to {actions.high.tolist()}. Set model.robot.low={new_low.tolist()} and "
            f"model.robot.high={new_high.tolist()}, which contain the actions."
        )


def _list_episodes(folder: Path, instruction: str) -> list[RecordedEpisode]:
    """Returns the episodes of an instruction in a data set of several. A single instruction may have another text.

    Raises UserError if none of several instructions is the given one.
    """
    episodes = list(open_dataset(folder).episodes())
    instructions = sorted({each.instruction for each in episodes})
    if len(instructions) < 2:
        return episodes
    if instruction not in instructions:
        raise UserError(
            f"replay.demonstrations={folder} has episodes of several tasks, and none of the instruction "
            f"{instruction!r}; its instructions are {', '.join(map(repr, instructions))}. Name one of them in "
            "task.starts.instructions."
        )
    return [each for each in episodes if each.instruction == instruction]


def _find_scale(recipe: Recipe) -> float:
    """Returns the factor of a recorded reward: the episode's, or 1 for successes."""
    episode = recipe.episode
    return episode.reward_scale if isinstance(episode, RobotConfig) and episode.reward == "return" else 1.0


def _open_world_model(recipe: Recipe, folder: Path, newest: Path | None, groups: RoleGroups) -> WorldLearning | None:
    if recipe.world_model is None:
        return None
    published = folder / WORLD_MODEL_FOLDER
    shutil.rmtree(published, ignore_errors=True)
    if newest and (kept := newest / REPLAY_FOLDER / WORLD_MODEL_FOLDER).is_dir():
        shutil.copytree(kept, published)
    actions = policy_actions(policy_actions_of(recipe))
    assert isinstance(recipe.episode, RobotConfig)  # checked before the run
    bounds, largest = read_spec(recipe.episode.env).action, np.finfo(np.float32).max
    low, high = (np.clip(ends, -largest, largest) for ends in (bounds.low, bounds.high))  # a file has no infinity

    def decode(token_ids: IntArray) -> FloatArray:
        return np.clip(actions.decode(token_ids), low, high)  # as the simulator executed them

    return WorldLearning(
        group=cast(WorldModelGroup, groups.others["world_model"][0]),
        settings=recipe.world_model,
        folder=published,
        decode=decode,
        bounds=(tuple(low.tolist()), tuple(high.tolist())),
    )


def read_world_models(recipe: Recipe, folder: Path) -> Recipe:
    """Returns a recipe whose imagined episodes read the world models that the run in `folder` publishes."""
    episode = recipe.episode
    if not isinstance(episode, RobotConfig) or episode.imagined is None:
        return recipe
    imagined = episode.imagined.model_copy(update={"published_in": str((folder / WORLD_MODEL_FOLDER).resolve())})
    return recipe.model_copy(update={"episode": episode.model_copy(update={"imagined": imagined})})
