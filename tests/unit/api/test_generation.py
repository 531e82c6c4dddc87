"""A program's responses are drawn from the distribution that the run samples from."""

import math

import pytest
import torch
from transformers import GenerationConfig

from interlace.api.generation import generate_texts
from interlace.core.errors import UserError
from interlace.core.types import SamplingParams
from interlace.data.config import PromptFormat
from interlace.data.formatting import Messages, Row
from interlace.models.tiny import build_tiny

PROMPTS = ["1+1", "hello"]


def test_the_generation_config_of_a_model_has_no_effect() -> None:
    model, tokenizer = build_tiny("micro", 0)
    hot = SamplingParams(max_new_tokens=16)
    cold = SamplingParams(max_new_tokens=16, temperature=0.0)

    def generate(sampling: SamplingParams) -> list[str]:
        torch.manual_seed(0)
        return generate_texts(model, tokenizer, PROMPTS, PromptFormat(), sampling)

    plain = [generate(cold), generate(hot)]
    own = GenerationConfig(do_sample=True, repetition_penalty=1.5, top_k=1, min_new_tokens=16)
    model.generation_config = own
    assert [generate(cold), generate(hot)] == plain
    assert plain[0] != plain[1], "top_k=1 would be greedy"
    assert model.generation_config is own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_responses_follow_the_penalties_biases_and_ends_of_the_run(temperature: float) -> None:
    model, tokenizer = build_tiny("micro", 0)
    plain = SamplingParams(max_new_tokens=12, temperature=temperature)

    def generate(**changes: object) -> list[str]:
        torch.manual_seed(0)
        return generate_texts(model, tokenizer, PROMPTS, PromptFormat(), plain.model_copy(update=changes))

    forbidden = set(range(len(tokenizer))) - {5, 6}
    texts = generate(logit_bias=tuple((token, -math.inf) for token in forbidden))
    allowed = tokenizer.decode([5]), tokenizer.decode([6])
    assert all(set(text) <= set("".join(allowed)) and len(text) == 12 for text in texts)
    # A large penalty forbids a second occurrence of a token in the response, not one that is in the prompt.
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    ten = tuple((token, -math.inf) for token in range(len(tokenizer)) if token not in digits)
    assert {*map(len, map(set, generate(logit_bias=ten, presence_penalty=1e4, max_new_tokens=10)))} == {10}
    stop = generate(logit_bias=ten)[0][4]
    assert all(text.find(stop) in (-1, len(text) - 1) for text in generate(logit_bias=ten, stop=(stop,)))
    with pytest.raises(UserError, match="forbids all"):
        generate(logit_bias=tuple((token, -math.inf) for token in range(len(tokenizer))))


def test_ids_beyond_the_tokenizer_are_not_drawn() -> None:
    model, tokenizer = build_tiny("micro", 0)
    model.resize_token_embeddings(len(tokenizer) + 2000)
    sampling = SamplingParams(max_new_tokens=30)
    assert all(len(text) >= 10 for text in generate_texts(model, tokenizer, PROMPTS, PromptFormat(), sampling))


def test_prompts_are_written_by_the_renderer_of_the_run() -> None:
    model, tokenizer = build_tiny("micro", 0)
    written: list[str] = []

    def write(messages: Messages, row: Row) -> list[int]:
        written.append(messages[-1].content)
        return [5, 6, 7]

    style = PromptFormat(chat_template=True)
    tokenizer.chat_template = tokenizer.chat_template or "{% for m in messages %}{{ m.content }}{% endfor %}"
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    one, other = generate_texts(model, tokenizer, PROMPTS, style, sampling, write)
    assert written == PROMPTS and one == other


def test_a_response_ends_at_the_context_of_the_model() -> None:
    model, tokenizer = build_tiny("micro", 0)
    context = model.config.max_position_embeddings
    length = len(tokenizer("1")["input_ids"])
    sampling = SamplingParams(max_new_tokens=100, temperature=0.0, stop=())
    prompt = "1" * (context - 5) if length == 1 else "1"
    (found,) = generate_texts(model, tokenizer, [prompt], PromptFormat(), sampling)
    assert len(tokenizer(found)["input_ids"]) <= 6
    with pytest.raises(UserError, match=r"prompts\[1\] has .* tokens, and the model's context"):
        generate_texts(model, tokenizer, ["1", "1" * context], PromptFormat(), sampling)


def test_min_p_comes_before_top_p() -> None:
    """After min_p one token has the share top_p; transformers' own order left two, with other probabilities."""
    model, tokenizer = build_tiny("micro", 0)
    biases = ((65, 100 + math.log(5)), (66, 100 + math.log(3)), (67, 100 + math.log(2)))
    sampling = SamplingParams(max_new_tokens=1, top_p=0.55, min_p=0.5, logit_bias=biases)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert len(set(generate_texts(model, tokenizer, ["a"] * 64, PromptFormat(), sampling))) == 1
