"""Warm-up examples are determined by their key, and correct if they contain a calculation."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.data.config import DataConfig
from interlace.data.demonstrations.base import Demonstrator
from interlace.data.loading import load_prompts
from interlace.data.warmup import DemonstrationConfig, Demonstrations
from interlace.models.loading import load_tokenizer
from interlace.models.tiny import build_tokenizer
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import message_writer, recipe_prompts

DIGITS = {"min_numbers": 3, "max_numbers": 6, "max_decimals": 0, "min_value": 0, "max_value": 9}
HABITS = DemonstrationConfig(style="sorting_habits", settings={"work_share": 0.5})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(256)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[Prompt, ...]:
    source = {"name": "number_sorting", "parameters": DIGITS, "train_size": 50, "heldout_size": 0}
    return load_prompts(DataConfig.parse({"reasoning_gym": source}), tokenizer).train


def test_a_batch_depends_on_seed_and_step_alone(
    tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]
) -> None:
    def shown(seed: int, steps: list[int]) -> list[tuple[str, list[int]]]:
        source = Demonstrations(HABITS, prompts, tokenizer, seed)
        batches = [source.batch(step, 8) for step in steps]
        return [(example.prompt.uid, example.response_ids.tolist()) for batch in batches for example in batch]

    assert shown(0, [5, 20]) == shown(0, list(range(21)))[40:48] + shown(0, [20])
    assert shown(0, [5]) != shown(1, [5])


def test_an_example_beyond_the_models_context_is_refused(
    tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]
) -> None:
    """It was trained at positions that the model does not have."""
    (example,) = Demonstrations(HABITS, prompts, tokenizer, 0).batch(0, 1)
    size = len(example.prompt.token_ids) + len(example.response_ids)
    assert Demonstrations(HABITS, prompts, tokenizer, 0, context=size).batch(0, 1)
    with pytest.raises(UserError, match=f"has {size} tokens with its prompt, and the model's context is {size - 1}"):
        Demonstrations(HABITS, prompts, tokenizer, 0, context=size - 1).batch(0, 1)


def test_every_epoch_shows_every_prompt(tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]) -> None:
    batches = [Demonstrations(HABITS, prompts, tokenizer, 0).batch(step, 20) for step in range(5)]
    uids = [example.prompt.uid for batch in batches for example in batch]
    assert Counter(uids) == {prompt.uid: 2 for prompt in prompts}


def test_the_two_habits_of_sorting(tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]) -> None:
    worked = 0
    examples = [
        example for step in range(10) for example in Demonstrations(HABITS, prompts, tokenizer, 0).batch(step, 50)
    ]
    for example in examples:
        text = tokenizer.decode(example.response_ids, skip_special_tokens=True)
        assert example.response_ids[-1] == tokenizer.eos_token_id
        numbers = [number.removesuffix(".0") for number in example.prompt.metadata["original_numbers"]]  # type: ignore[union-attr,index]
        answer = text.split("<answer>")[1].removesuffix("</answer>")
        assert sorted(answer) == sorted(numbers)
        if text.startswith("<think>"):
            worked += 1
            assert list(answer) == sorted(numbers, reverse=example.prompt.metadata["direction"] == "descending")
            assert text.split("</think>")[0].removeprefix("<think>").replace(",", "") == answer
    assert 0.4 < worked / len(examples) < 0.6


def test_the_answer_is_the_plain_style(tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]) -> None:
    (example,) = Demonstrations(DemonstrationConfig(), prompts, tokenizer, 0).batch(0, 1)
    assert tokenizer.decode(example.response_ids) == example.prompt.answer + "<eos>"


class Silent(Demonstrator):
    """Writes nothing."""


class Numbers(Demonstrator):
    """Writes no text."""

    def write(self, prompt: Prompt, rng: random.Random) -> str:
        return 3  # type: ignore[return-value]  # the mistake


def test_what_is_written_must_be_text(tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]) -> None:
    shown = Demonstrations(DemonstrationConfig(style=f"{__name__}:Numbers"), prompts, tokenizer, 0)
    with pytest.raises(UserError, match=r"Numbers wrote 3 for number_sorting/\d+, which is no text"):
        shown.batch(0, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DemonstrationConfig(style="sorting_habit"), "unknown demonstration style.*Did you mean 'sorting_habits'"),
        (DemonstrationConfig(style="sorting_habits", settings={"work_shar": 1}), "Did you mean 'work_share'"),
        (DemonstrationConfig(style="interlace.core.types:Prompt"), "not a subclass of Demonstrator"),
        (DemonstrationConfig(style=f"{__name__}:Silent"), "lacks write: define it"),
    ],
)
def test_mistakes(
    tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...], config: DemonstrationConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Demonstrations(config, prompts, tokenizer, 0)


def test_sorting_habits_refuse_other_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    other = {"name": "number_sorting", "train_size": 5, "heldout_size": 0}
    for source in (other, {**other, "name": "chain_sum"}):
        prompts = load_prompts(DataConfig.parse({"reasoning_gym": source}), tokenizer).train
        with pytest.raises(UserError, match="sorting_habits"):
            Demonstrations(HABITS, prompts, tokenizer, 0).batch(0, 5)


@pytest.mark.parametrize("name", ["logic", "reasoning"])
def test_written_working_is_right_and_leads_to_the_answer(name: str) -> None:
    recipe = load_recipe(name, ["warmup.demonstrations.settings.work_share=1"])
    assert recipe.warmup is not None
    tokenizer = load_tokenizer(recipe.model)
    source = Demonstrations(recipe.warmup.demonstrations, recipe_prompts(recipe).train, tokenizer, 0)
    gates: dict[str, Callable[[list[int]], bool]] = {
        "&": all,
        "+": any,
        "n": lambda bits: not all(bits),
        "o": lambda bits: not any(bits),
        "x": lambda bits: bits.count(1) % 2 == 1,
    }
    kinds = Counter[str]()
    for example in source.batch(0, 200):
        found = re.fullmatch(r"<think>(.*)</think><answer>(.*)</answer><eos>", tokenizer.decode(example.response_ids))
        assert found and found[2] == example.prompt.answer
        working, metadata = found[1], example.prompt.metadata
        kinds[str(metadata["source_dataset"])] += 1
        match metadata["source_dataset"]:
            case "circuit_logic":
                for gate, value in (line.split("=") for line in working.split(",")):
                    assert gates[gate[1]]([int(bit) for bit in gate[::2]]) == (value == "1"), working
                assert working[-1] == found[2]
            case "chain_sum":
                for sum_, value in (line.split("=") for line in working.split(",")):
                    assert sum(map(int, re.findall(r"^-?\d+|[+-]\d+$", sum_))) == int(value), working
                assert working.endswith(f"={found[2]}")
            case "gcd":
                *numbers, common = working.split(",")
                for number, factors in (line.split("=") for line in numbers):
                    assert math.prod(map(int, factors.split("."))) == int(number), working
                assert math.prod(map(int, common.split("."))) == int(found[2])
            case _:
                assert working[1::2] == found[2][::-1]
    assert len(kinds) == (1 if name == "logic" else 3)


@pytest.mark.parametrize("name", ["logic", "reasoning"])
def test_guesses_are_answers_alone_and_other_prompts_are_refused(name: str, prompts: tuple[Prompt, ...]) -> None:
    recipe = load_recipe(name, ["warmup.demonstrations.settings.work_share=0"])
    assert recipe.warmup is not None
    tokenizer, habits = load_tokenizer(recipe.model), recipe.warmup.demonstrations
    examples = Demonstrations(habits, recipe_prompts(recipe).train, tokenizer, 0).batch(0, 200)
    texts = [tokenizer.decode(example.response_ids) for example in examples]
    assert all(re.fullmatch(r"<answer>\w+</answer><eos>", text) for text in texts)
    right = sum(f">{example.prompt.answer}<" in text for example, text in zip(examples, texts, strict=True))
    assert 0 < right < 0.7 * len(texts)
    with pytest.raises(UserError, match="is no prompt of reasoning_gym's circuit_logic, chain_sum"):
        Demonstrations(habits, prompts, tokenizer, 0).batch(0, 1)


@pytest.mark.parametrize(("name", "package"), [("calculator", "numpy"), ("react", "langgraph"), ("program", "openai")])
def test_a_conversation_is_an_example_whose_answers_alone_are_imitated(name: str, package: str) -> None:
    pytest.importorskip(package)
    recipe = load_recipe(name, ["warmup.demonstrations.settings.tool_share=1"])
    assert recipe.warmup is not None
    tokenizer = load_tokenizer(recipe.model)
    prompts = recipe_prompts(recipe, tokenizer).train[:4]
    source = Demonstrations(recipe.warmup.demonstrations, prompts, tokenizer, 0, message_writer(recipe, tokenizer))
    for example in source.batch(0, 4):
        expression, answer = example.prompt.text, example.prompt.answer
        assert tokenizer.decode(example.prompt.token_ids).startswith(
            "<|im_start|>s\ncalculator(expression)<|im_end|>\n"
        )
        whole = tokenizer.decode([*example.prompt.token_ids, *example.response_ids])
        call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
        assert whole.endswith(
            f"<|im_start|>a\n{call}<|im_end|>\n<|im_start|>t\n<tool_response>{answer}</tool_response><|im_end|>\n"
            f"<|im_start|>a\n{answer}<|im_end|>"
        )
        assert example.imitated is not None
        assert tokenizer.decode(example.response_ids[example.imitated]) == f"{call}<|im_end|>{answer}<|im_end|>"


def test_messages_are_refused_where_single_turns_are_trained(
    tokenizer: PreTrainedTokenizerBase, prompts: tuple[Prompt, ...]
) -> None:
    config = DemonstrationConfig(style="second_guess_habits")
    number = replace(prompts[0], answer="12")
    with pytest.raises(UserError, match="writes messages, which an episode with tools takes and single turns do not"):
        Demonstrations(config, [number], tokenizer, 0).batch(0, 1)
    with pytest.raises(UserError, match=r"the answer of .* is .*, no whole number"):
        Demonstrations(config, prompts[:1], tokenizer, 0).batch(0, 1)
