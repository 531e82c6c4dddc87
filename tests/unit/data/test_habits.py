"""A warm-up's criterion measures the demonstrated habit, if the prompt determines it."""

from transformers import PreTrainedTokenizerBase

from interlace.data.warmup import Demonstrations
from interlace.models.loading import load_tokenizer
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import message_writer, recipe_prompts


def checked_text(name: str) -> tuple[str, str]:
    """Returns a checked example of a recipe as text: all of it, and the measured part."""
    recipe = load_recipe(name, ["task.reasoning_gym.train_size=8", "task.reasoning_gym.heldout_size=4"])
    assert recipe.warmup
    prompts = recipe_prompts(recipe)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(recipe.model)
    source = Demonstrations(recipe.warmup.demonstrations, prompts.train, tokenizer, recipe.seed, message_writer(recipe))
    shown = source.checked(prompts.heldout, 6)
    assert [each.prompt.uid for each in shown[:4]] == [prompt.uid for prompt in prompts.heldout]
    assert shown[0].checked is not None
    return tokenizer.decode(shown[0].response_ids), tokenizer.decode(shown[0].response_ids[shown[0].checked])


def test_of_a_second_guess_only_the_second_turn_is_measured() -> None:
    whole, measured = checked_text("second_guess")
    assert len(measured) < len(whole) and measured.startswith(measured.lstrip()[:2])
    assert whole.count("<|im_end|>") >= 2 and measured.count("<|im_end|>") == 1, (whole, measured)


def test_of_a_tool_call_all_but_the_token_that_chooses_it_is_measured() -> None:
    whole, measured = checked_text("calculator")
    assert "calculator" in measured and '"expression"' in measured
    assert not whole.startswith(measured[:8])


def test_of_a_worked_answer_all_behind_the_tag_is_measured() -> None:
    whole, measured = checked_text("quickstart")
    assert whole == "<think>" + measured and "</think><answer>" in measured
