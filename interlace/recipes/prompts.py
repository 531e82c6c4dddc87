"""A recipe's prompts, as its episodes need them."""

from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.data.loading import PromptSet, load_prompts
from interlace.episodes.by_row import check_rows
from interlace.episodes.config import create_kind
from interlace.models.loading import load_tokenizer
from interlace.recipes.config import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def recipe_prompts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> PromptSet:
    """Reads or draws both splits. UserError as load_prompts, and where an episode cannot be asked these prompts."""
    tokenizer = tokenizer or load_tokenizer(recipe.model)
    prompts = load_prompts(recipe.task, tokenizer)
    if recipe.episode.is_single_turn:
        return prompts
    chat = recipe.task.format.chat_template and bool(tokenizer.chat_template)
    for config in (recipe.episode, *recipe.episode.others.values()):
        if create_kind(config).needs_chat and not chat:
            why = "the tokenizer has none" if recipe.task.format.chat_template else "task.format.chat_template=false"
            raise UserError(
                f"episode {config.name!r} works on messages, which only a chat template can write, and {why}. Take an "
                "instruct model or its tokenizer (model.tokenizer), or another episode."
            )
    check_rows(recipe.episode, [*prompts.train, *prompts.heldout])
    return prompts
