"""Refuses settings that have no effect because of another setting's value."""

from collections.abc import Iterator

from interlace.core.errors import UserError
from interlace.data.warmup import DemonstrationConfig
from interlace.engines.train.config import OptimizerConfig
from interlace.robots.env_stage import simulators_of
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.sections import EvaluationConfig


def refuse_unused(recipe: Recipe) -> None:
    """Raises UserError for the first such setting of the optimizers, the evaluation and the written examples."""
    for key, optimizer in _list_optimizers(recipe):
        _check_rate(key, optimizer)
    _check_evaluation(recipe)
    _check_writers(recipe)


def _list_optimizers(recipe: Recipe) -> Iterator[tuple[str, OptimizerConfig]]:
    yield "optimizer", recipe.optimizer
    yield "critic.optimizer", recipe.critic.optimizer
    if recipe.warmup is not None:
        yield "warmup.optimizer", recipe.warmup.optimizer


def _check_rate(key: str, optimizer: OptimizerConfig) -> None:
    if optimizer.schedule != "constant":
        return
    for name, value, unset in (
        ("total_steps", optimizer.total_steps, None),
        ("min_lr_ratio", optimizer.min_lr_ratio, 0),
    ):
        if value != unset:
            raise UserError(
                f"{key}.{name}={value} is of a learning rate that falls, and {key}.schedule is constant. Set "
                f"{key}.schedule=linear or cosine, or {key}.{name}={'null' if unset is None else unset}."
            )


def _check_evaluation(recipe: Recipe) -> None:
    evaluation, default = recipe.evaluation, EvaluationConfig()
    if evaluation.temperature != default.temperature and not evaluation.samples_per_prompt:
        raise UserError(
            f"evaluation.temperature={evaluation.temperature:g} is of sampled answers, and "
            "evaluation.samples_per_prompt=0 samples none. Set samples_per_prompt to 1 or more, or remove temperature."
        )
    if evaluation.filmed != default.filmed and (simulators_of(recipe.episode) is None or not evaluation.num_shown):
        raise UserError(
            f"evaluation.filmed={evaluation.filmed} chooses episodes of a robot, and none is filmed: the episode "
            f"{recipe.episode.name!r} has no simulators, or evaluation.num_shown is 0. Remove evaluation.filmed."
        )


def _check_writers(recipe: Recipe) -> None:
    """Raises UserError for written completions of rows that have completions, or of a run without given rows."""
    task, warmup = recipe.task, recipe.warmup
    if warmup is not None and warmup.experts is not None and warmup.demonstrations != DemonstrationConfig():
        raise UserError(
            "warmup.demonstrations write texts, and with warmup.experts the warm-up imitates a robot's expert. Remove "
            "one of them."
        )
    if task.demonstrations is None:
        return
    if algorithm_of(recipe).rows is None:
        raise UserError(
            f"task.demonstrations write the completions of sft, dpo and reward_model, and algorithm "
            f"{recipe.algorithm.name!r} trains on responses of the policy. Remove it; a warm-up has "
            "warmup.demonstrations."
        )
    if not any(source.reasoning_gym for source in (task, *task.mixture, *task.heldout_sets.values())):
        raise UserError(
            "task.demonstrations write the completions of generated prompts, and the rows of the task have their own. "
            "Remove it."
        )
