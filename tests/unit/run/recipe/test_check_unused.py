"""A setting that another setting's value leaves without effect is refused, with the repair."""

import pytest

from interlace.core.errors import UserError
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe

GENERATED = "{source: chain_sum, weight: 1}"


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("quickstart", ["evaluation={samples_per_prompt: 0, temperature: 0.5}"], "temperature=0.5 is of sampled"),
        ("quickstart", ["evaluation.filmed=first"], "the episode 'single_turn' has no simulators"),
        ("quickstart", ["task.demonstrations={style: answer}"], "algorithm 'grpo' trains on responses"),
        ("quickstart", [f"task={{mixture: [{GENERATED}], max_prompt_tokens: 9}}"], "belong to each of its sources"),
        ("quickstart", ["recovery={memory_checkpoint_every: 1, restarts_per_hour: {trainer: 0}}"], "forbids that"),
        ("quickstart", ["recovery.memory_checkpoint_every=4", "checkpoint_every=2"], "has a checkpoint on disk"),
        ("robot", ["warmup.demonstrations.style=sorting_habits"], "imitates a robot's expert"),
        ("sft", ["task={files: {train: a.jsonl}, demonstrations: {style: answer}}"], "have their own"),
        ("sft", ["evaluation={samples_per_prompt: 2, pass_at: 2}"], "evaluation.pass_at is of sampled answers"),
        ("dpo", ["evaluation.samples_per_prompt=3"], "evaluation.samples_per_prompt is of sampled answers"),
        ("dpo", ["task.sampler=solve_rate"], "draws by measured solve rates, and algorithm 'dpo' measures none"),
    ],
)
def test_a_setting_without_effect_is_refused(recipe: str, changes: list[str], message: str) -> None:
    check_settings(load_recipe(recipe))
    with pytest.raises(UserError, match=message):
        check_settings(load_recipe(recipe, changes))


def test_settings_with_effect_are_accepted() -> None:
    check_settings(load_recipe("quickstart", ["evaluation={samples_per_prompt: 2, temperature: 0.5}"]))
    check_settings(load_recipe("code", ["optimizer.schedule=constant"]))  # a sweep of schedules
    check_settings(load_recipe("quickstart", ["recovery.memory_checkpoint_every=2", "checkpoint_every=4"]))
    check_settings(load_recipe("quickstart", ["task.sampler=solve_rate"]))
    check_settings(load_recipe("robot", ["evaluation.filmed=first"]))


def test_a_stored_run_with_a_setting_without_effect_is_accepted() -> None:
    """A run of an earlier version may have one, and its settings cannot be changed."""
    check_settings(load_recipe("quickstart", ["evaluation.filmed=first"]), is_stored=True)
    check_settings(load_recipe("dpo", ["evaluation.samples_per_prompt=3"]), is_stored=True)
