"""A program's responses are drawn from the distribution that the run samples from."""

import torch
from transformers import GenerationConfig

from interlace.api.generation import generate_texts
from interlace.core.types import SamplingParams
from interlace.data.config import PromptFormat
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
