"""Checks of a robot's tasks, its off-policy learner, its world model and its imagined episodes."""

import math
from collections.abc import Sequence
from pathlib import Path

from interlace.algorithms.replayed import ReplayedAlgorithm, ReplayedSettings
from interlace.core.errors import UserError
from interlace.core.training import UpdateConfig
from interlace.data.config import StartSource
from interlace.models.config import RobotShape
from interlace.robots.datasets import layout
from interlace.robots.datasets.load import open_dataset
from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.load import find_family
from interlace.robots.episodes.robot import RobotConfig
from interlace.robots.world_model.imagination import ImaginationConfig
from interlace.run.recipe.config import Recipe, algorithm_of


def check_learning(recipe: Recipe) -> None:
    """Raises UserError for a world model without data or use, for imagined episodes without a world model, for starts
    of tasks that the simulators lack, and for an off-policy algorithm or demonstrations that cannot work."""
    _check_tasks(recipe)
    _check_off_policy(recipe)
    _check_expert(recipe)
    _check_cloning(recipe)
    _check_data_sets(recipe)
    _check_demonstrated_rewards(recipe)
    _check_world_model(recipe)


def _check_world_model(recipe: Recipe) -> None:
    """Raises UserError for a world model without data or use, and for imagined episodes without a world model."""
    episode = recipe.episode
    imagined = episode.imagined if isinstance(episode, RobotConfig) else None
    if recipe.world_model is not None and isinstance(episode, RobotConfig):
        _check_end(episode)
    if recipe.world_model is not None and recipe.replay is None:
        raise UserError(
            "world_model is fitted to trajectories that are kept, and the recipe keeps none. Add "
            "replay={updates: 0}, which keeps them and trains the policy on each once."
        )
    if recipe.world_model is not None and not isinstance(episode, RobotConfig):
        raise UserError(f"world_model is of a robot's simulators, and episode {episode.name!r} has none. Remove it.")
    if imagined is not None and imagined.published_in is None and recipe.world_model is None:
        raise UserError(
            "episode.imagined is played by a world model, and the recipe fits none. Add world_model={} and "
            "replay={updates: 0}, or name a folder of published models in episode.imagined.published_in."
        )
    starts = recipe.task.starts
    if starts is not None and starts.imagined_per_start and imagined is None:
        raise UserError(
            f"task.starts.imagined_per_start={starts.imagined_per_start}, but the recipe has no episode.imagined that "
            "says how they are played. Add episode.imagined={max_disagreement: 0.5}, or set it to 0."
        )
    if imagined is not None and starts is not None and len(starts.instructions) > 1:
        raise UserError(
            f"episode.imagined with {len(starts.instructions)} tasks: an imagined episode begins in a state of any "
            "task, which its instruction would not go with. Keep one task, or remove episode.imagined."
        )
    if recipe.world_model is not None:
        _check_kind(recipe.world_model.kind, recipe.model.robot, imagined)


def _check_end(episode: RobotConfig) -> None:
    """Raises UserError for episodes that continue after a success, whose chunk a sample does not name."""
    if not find_family(episode.env.family, episode.env.settings)[1].end_on_success:
        raise UserError(
            "world_model learns that a task was solved by the last chunk of its episode, and with "
            "episode.env.settings.end_on_success=false episodes continue after it. Remove the setting, or world_model."
        )


def _check_kind(kind: str, robot: RobotShape | None, imagined: ImaginationConfig | None) -> None:
    """Raises UserError if the kind of a world model does not fit the policy's observations or the imagined episodes."""
    if robot is not None and kind == "ensemble" and robot.image_size:
        raise UserError(
            f"world_model.kind=ensemble predicts state vectors, and the policy reads pictures (model.robot.image_size="
            f"{robot.image_size}). Set world_model.kind=latent, or model.robot.image_size=0."
        )
    if robot is not None and kind == "latent" and (robot.state_size or robot.image_size % 16):
        raise UserError(
            "world_model.kind=latent predicts pictures alone, whose side is a multiple of 16, and the policy reads "
            f"model.robot.state_size={robot.state_size} and image_size={robot.image_size}. Set state_size=0 and "
            "image_size=48 or 64, and episode.env.settings.image_size alike, or world_model.kind=ensemble."
        )
    if kind == "latent" and imagined is not None and (imagined.max_error is None or imagined.max_disagreement):
        raise UserError(
            f"episode.imagined has max_error={imagined.max_error} and max_disagreement={imagined.max_disagreement}, "
            "and a world model of kind latent is one network, which cannot disagree. Set max_error, such as 1.0, and "
            "remove max_disagreement."
        )


def _check_data_sets(recipe: Recipe) -> None:
    """Raises UserError for a data set of demonstrations that cannot be read."""
    experts, robot = recipe.warmup.experts if recipe.warmup else None, recipe.model.robot
    cloned = recipe.replay.experts if recipe.replay else None
    given = {
        "warmup.experts.dataset": experts.dataset if experts else None,
        "replay.experts.dataset": cloned.dataset if cloned else None,
        "replay.demonstrations": recipe.replay.demonstrations if recipe.replay else None,
    }
    for key, folder in given.items():
        if folder is None:
            continue
        shapes = open_dataset(Path(folder)).shapes
        for column in (layout.ACTION, *(_list_learned_columns(recipe) if key == "replay.demonstrations" else ())):
            if column not in shapes:
                raise UserError(
                    f"{key}={folder} has no column {column!r}, which the recipe needs. Record it with "
                    "`interlace record`."
                )
        size = math.prod(shapes[layout.ACTION])
        if robot is not None and size != robot.action_size:
            raise UserError(
                f"{key}={folder} has actions of {size} numbers, and model.robot.action_size is {robot.action_size}. "
                "Name a data set of the same robot."
            )


def _list_learned_columns(recipe: Recipe) -> tuple[str, ...]:
    """Returns the columns of demonstrations from which an off-policy algorithm learns, besides the actions."""
    returns = isinstance(recipe.episode, RobotConfig) and recipe.episode.reward == "return"
    return layout.STATE_COLUMN, layout.REWARD if returns else layout.SUCCESS, layout.DONE


def _check_off_policy(recipe: Recipe) -> None:
    """Raises UserError for an off-policy algorithm without a replay, and for settings that have no effect on it."""
    name, replay, robot = recipe.algorithm.name, recipe.replay, recipe.model.robot
    learns = replay is not None and replay.learner == "actor_critic"
    if not algorithm_of(recipe).needs.transitions:
        if learns:
            raise UserError(
                f"replay.learner=actor_critic is the learner of an off-policy algorithm, and algorithm {name!r} is "
                "none. Take algorithm=sac, iql or awr, or replay.learner=imitation."
            )
        return
    if not learns or not isinstance(recipe.episode, RobotConfig):
        raise UserError(
            f"algorithm {name!r} trains from a replay of a robot's episodes: set replay.learner=actor_critic and "
            "episode.name=robot, as the recipe robot-sac does."
        )
    _check_draws(recipe)
    algorithm = algorithm_of(recipe)
    if recipe.world_model is not None or recipe.actor.lora is not None:
        raise UserError(f"algorithm {name!r} trains no adapter and no world model: remove actor.lora and world_model.")
    for key, field in UpdateConfig.model_fields.items():
        if getattr(recipe.algorithm.settings, key) != field.get_default(call_default_factory=True):
            raise UserError(
                f"algorithm.{key} is of losses per token, and algorithm {name!r} has none. Remove the setting."
            )
    _check_cuts(recipe, "algorithm.updates_per_turn")
    heads = algorithm.heads if isinstance(algorithm, ReplayedAlgorithm) else ()
    if robot is not None and (robot.head not in heads or robot.image_size or not robot.state_size):
        raise UserError(
            f"algorithm {name!r} trains a policy of state vectors whose head is {' or '.join(heads)}, and the model "
            f"has head {robot.head!r}, state_size={robot.state_size} and image_size={robot.image_size}. Set "
            f"model.robot.head={heads[0]}, model.robot.image_size=0 and the size of the state."
        )
    if recipe.task.starts is not None and len(recipe.task.starts.instructions) > 1:
        raise UserError(
            f"algorithm {name!r} trains one instruction, because its critics see the state alone, and "
            f"task.starts.instructions has {len(recipe.task.starts.instructions)}. Keep one."
        )


def _check_cuts(recipe: Recipe, number: str) -> None:
    """Raises UserError for minibatches of an algorithm without any. number: setting of the number of updates."""
    if recipe.minibatches != 1 or recipe.epochs != 1:
        raise UserError(
            f"minibatches={recipe.minibatches} and epochs={recipe.epochs} cut the samples of a step, on which "
            f"algorithm {recipe.algorithm.name!r} does not train. Set both to 1; {number} is the number of updates."
        )


def _check_demonstrated_rewards(recipe: Recipe) -> None:
    """Raises UserError if the rewards of demonstrations and of the policy's episodes are of different sizes."""
    episode = recipe.episode
    if recipe.replay is None or recipe.replay.demonstrations is None or not isinstance(episode, RobotConfig):
        return
    if episode.reward == "return" and find_family(episode.env.family, episode.env.settings)[1].rewards_chunks:
        raise UserError(
            "replay.demonstrations have the rewards of all actions, and with episode.env.settings.light=true a chunk "
            "of the policy has that of its last action alone. Set light=false, or episode.reward=success."
        )


def _check_draws(recipe: Recipe) -> None:
    """Raises UserError for demonstrations, priorities and turns that an off-policy algorithm cannot draw."""
    name, replay = recipe.algorithm.name, recipe.replay
    settings, algorithm = recipe.algorithm.settings, algorithm_of(recipe)
    shown = replay.demonstrations if replay else None
    if shown is None and isinstance(settings, ReplayedSettings) and settings.offline_updates:
        raise UserError(
            f"algorithm.offline_updates={settings.offline_updates} learn from demonstrations, and "
            "replay.demonstrations names none. Name a data set, or set algorithm.offline_updates=0."
        )
    if shown is not None and isinstance(settings, ReplayedSettings) and settings.turns_per_update < 2:
        raise UserError(
            "replay.demonstrations are half of each update, and algorithm.turns_per_update=1 has no half. Set it to 2 "
            "or more."
        )
    most = replay.capacity * recipe.episode.max_turns if replay else 0
    if replay and isinstance(settings, ReplayedSettings) and most < settings.start_turns:
        raise UserError(
            f"algorithm.start_turns={settings.start_turns}, and the replay holds at most {most} turns "
            f"(replay.capacity={replay.capacity} episodes of episode.max_turns={recipe.episode.max_turns}), so no "
            f"update would be made after a step. Set replay.capacity to "
            f"{-(-settings.start_turns // recipe.episode.max_turns)} or more, or algorithm.start_turns to {most} or "
            "less."
        )
    if (
        replay
        and replay.order == "priority"
        and isinstance(algorithm, ReplayedAlgorithm)
        and not algorithm.has_priorities
    ):
        raise UserError(
            f"replay.order=priority draws turns by the critics' error, which algorithm {name!r} does not give. Set "
            "replay.order=uniform, or algorithm=sac."
        )


def _check_expert(recipe: Recipe) -> None:
    """Raises UserError if an algorithm that imitates an expert has none, or an expert has no learner."""
    name, needs = recipe.algorithm.name, algorithm_of(recipe).needs
    imitates = not needs.on_policy and not needs.transitions and not needs.demonstrations
    expert = recipe.episode.expert if isinstance(recipe.episode, RobotConfig) else None
    _check_partners(recipe, needed=imitates, learner="expert", algorithm="dagger", example="robot-dagger")
    if imitates and isinstance(recipe.episode, RobotConfig) and recipe.episode.imagined is not None:
        raise UserError(
            f"algorithm {name!r} asks the simulator's expert, and imagined episodes have none. Remove episode.imagined."
        )
    if (expert is not None) != imitates:
        raise UserError(
            f"algorithm {name!r} with episode.expert={'set' if expert else None}: the expert's labels are trained by "
            "algorithm dagger alone, and it trains nothing else. Set both, or neither."
        )
    if not imitates:
        return
    _check_cuts(recipe, "replay.updates")
    if recipe.model.robot is not None and recipe.model.robot.head == "flow":
        raise UserError(
            f"algorithm {name!r} imitates answers, and an answer of model.robot.head=flow is a chain of steps that an "
            "expert does not give. Take head tokens, gaussian or squashed."
        )


def _check_cloning(recipe: Recipe) -> None:
    """Raises UserError if algorithm bc and its learner are not set together, and for settings without effect on it."""
    name, imitates = recipe.algorithm.name, algorithm_of(recipe).needs.demonstrations
    advice = " To imitate demonstrations before another algorithm, set warmup.experts."
    _check_partners(recipe, needed=imitates, learner="demonstrations", algorithm="bc", example="clone", advice=advice)
    if not imitates:
        return
    if not isinstance(recipe.episode, RobotConfig):
        raise UserError(
            f"algorithm {name!r} imitates demonstrations of a robot, and episode {recipe.episode.name!r} has none. Set "
            "algorithm=sft, or episode.name=robot."
        )
    if recipe.world_model is not None or recipe.episode.imagined is not None:
        raise UserError(
            f"algorithm {name!r} stores no episodes, and a world model is fitted to stored ones. Remove world_model "
            "and episode.imagined."
        )
    _check_cuts(recipe, "replay.updates")


def _check_partners(
    recipe: Recipe, *, needed: bool, learner: str, algorithm: str, example: str, advice: str = ""
) -> None:
    """Raises UserError if a learner of the replay is set without its algorithm, or an algorithm without its learner.

    needed: True if the recipe's algorithm needs the learner. example: recipe that sets both.
    """
    found = None if recipe.replay is None else recipe.replay.learner
    if (found == learner) != needed:
        raise UserError(
            f"algorithm {recipe.algorithm.name!r} with replay.learner={found}: the learner `{learner}` and algorithm "
            f"{algorithm} need each other. Set both, as the recipe {example} does, or neither.{advice}"
        )


def _check_tasks(recipe: Recipe) -> None:
    env, sets = simulators_of(recipe.episode), recipe.task.heldout_sets
    if env is not None and find_family(env.family, env.settings)[1].instructions:
        raise UserError(
            "episode.env.settings.instructions are texts of the simulators, and the policy reads those of its starts "
            "or rows. Remove the setting, and write the texts in task.starts.instructions."
        )
    given = {"task.starts": recipe.task.starts}
    given |= {f"task.heldout_sets.{name}.starts": source.starts for name, source in sets.items()}
    for section, starts in given.items():
        if starts is not None and env is not None:
            _check_starts(section, starts, find_family(env.family, env.settings)[1].tasks)


def _check_starts(section: str, starts: StartSource, names: Sequence[str]) -> None:
    """Raises UserError for a start of a task that the simulators do not have. names: of their tasks."""
    for instruction, task in zip(starts.instructions, starts.tasks or range(len(starts.instructions)), strict=True):
        if not 0 <= task < len(names):
            raise UserError(
                f"the instruction {instruction!r} of {section} is of task {task}, and episode.env.settings.tasks has "
                f"{len(names)}: {', '.join(names)}. Give one instruction a task, or name ids in {section}.tasks."
            )
