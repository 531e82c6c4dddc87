"""Variables of the chat template reach the prompts of one-turn recipes too."""

import pytest

from interlace.core.errors import UserError
from interlace.models.tiny import build_tokenizer
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts

SETTINGS = [
    "model=tiny:micro-chat", "warmup=null", "task.reasoning_gym.train_size=4", "task.reasoning_gym.heldout_size=2",
    "renderer.chat_template_kwargs={enable_thinking: false}",
]  # fmt: skip


def test_a_one_turn_prompt_is_written_with_the_variables() -> None:
    tokenizer = build_tokenizer(1024, chat=True)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    plain, off = (
        recipe_prompts(load_recipe("quickstart", settings), tokenizer).train[0]
        for settings in (SETTINGS[:-1], SETTINGS)
    )
    closed = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert off.token_ids.tolist() == [*plain.token_ids.tolist(), *closed] and off.uid == plain.uid


def test_variables_without_a_chat_template_are_refused() -> None:
    recipe = load_recipe("quickstart", [*SETTINGS, "task.format.chat_template=false"])
    with pytest.raises(UserError, match=r"renderer.chat_template_kwargs = \{'enable_thinking': False\}, and no chat"):
        recipe_prompts(recipe, build_tokenizer(1024, chat=True))
