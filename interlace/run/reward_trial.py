"""Trial of a user's reward functions before a run replaces an earlier one."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from interlace.core.types import Prompt
from interlace.observe.run_folder import RunFolder
from interlace.rewards.config import reward_names
from interlace.rewards.scorer import try_reward
from interlace.run.recipe.config import Recipe, list_rewards
from interlace.run.recipe.prompts import recipe_prompts


def first_of_each_source(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Returns the first prompt of each source of a mixture; of another task, the first prompt."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.source, prompt)
    return list(found.values())


def try_before_replacing(recipe: Recipe, root: Path, name: str | None) -> None:
    """Calls the reward functions of a recipe whose run would replace the run of a name, as the run does at its start.

    Without this, the earlier run would be deleted before the mistake is found. Must not be called while an event loop
    runs. Raises UserError if a value is not a reward.
    """
    rewards = list_rewards(recipe)
    if name is None or not RunFolder.named(root, name).config.exists():
        return
    if not any(":" in each for reward in rewards for each in reward_names(reward)):
        return
    for prompt in first_of_each_source(recipe_prompts(recipe).train):
        asyncio.run(try_reward(recipe.task.rewards.get(prompt.source, recipe.reward), prompt))
