"""Refuses settings that have no effect because of another setting's value."""

from interlace.core.errors import UserError
from interlace.data.warmup import DemonstrationConfig
from interlace.robots.env_stage import simulators_of
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline
from interlace.run.recipe.sections import EvaluationConfig


def refuse_unused(recipe: Recipe) -> None:
    """Raises UserError for the first such setting of the evaluation and the written examples."""
    if is_offline(recipe):
        _check_offline_evaluation(recipe)
    _check_evaluation(recipe)
    _check_writers(recipe)


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


def _check_offline_evaluation(recipe: Recipe) -> None:
    """Raises UserError for settings of sampled answers: an evaluation computes the loss of held-out rows."""
    evaluation = recipe.evaluation
    sampled = {
        "pass_at": bool(evaluation.pass_at),
        "temperature": evaluation.temperature != 1,
        "samples_per_prompt": evaluation.samples_per_prompt > 1,
    }
    if found := next((key for key, is_set in sampled.items() if is_set), None):
        raise UserError(
            f"evaluation.{found} is of sampled answers, and algorithm {recipe.algorithm.name!r} evaluates the loss of "
            "held-out rows. Remove the setting; `interlace eval` samples answers by another recipe (--recipe)."
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
