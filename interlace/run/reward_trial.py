"""Trial of a user's reward functions at the start of a run."""

from collections.abc import Iterable

from interlace.core.types import Prompt
from interlace.rewards.scorer import try_reward
from interlace.run.recipe.config import Recipe


async def try_rewards(recipe: Recipe, prompts: Iterable[Prompt]) -> None:
    """Calls the reward functions with the first prompt of each source of a mixture, or of the whole task.

    Raises UserError if a value is not a reward.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.source, prompt)
    for prompt in first.values():
        await try_reward(recipe.task.rewards.get(prompt.source, recipe.reward), prompt)
