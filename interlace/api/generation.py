"""Responses of a trained model to prompts of a program."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.types import JSON, SamplingParams
from interlace.data.chat import read_messages
from interlace.data.config import PromptFormat
from interlace.data.formatting import render, to_prompts
from interlace.data.rows import Row
from interlace.models.loading import list_stop_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def generate_texts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str | Sequence[Mapping[str, JSON]]],
    style: PromptFormat,
    sampling: SamplingParams,
) -> list[str]:
    """Returns one response for each prompt. style: how the run writes its prompts.

    Of sampling, the lengths, the end tokens, temperature, truncation and repetition penalty are applied; the model's
    own generation_config is not, because the run did not sample by it.
    """
    import torch

    if not prompts:
        return []
    rows = [_make_row(prompt, f"prompts[{place}]") for place, prompt in enumerate(prompts)]
    ids = [each.token_ids.tolist() for each in to_prompts(rows, [render(row, style) for row in rows], style, tokenizer)]
    width = max(map(len, ids))
    pad = next(each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if isinstance(each, int))
    input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
    with torch.inference_mode(), _generate_by(model, _to_generation_config(model, tokenizer, sampling, pad)):
        written = model.generate(input_ids=input_ids, attention_mask=mask)  # type: ignore[operator]  # their own stub
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in written[:, width:]]


def _to_generation_config(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", sampling: SamplingParams, pad: int
) -> "GenerationConfig":
    from transformers import GenerationConfig

    stop_ids = {*list_stop_tokens(model, tokenizer), *sampling.stop_token_ids}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=sorted(stop_ids),
        pad_token_id=pad,
    )
    if sampling.temperature > 0:
        config.update(
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
    return config


@contextmanager
def _generate_by(model: "PreTrainedModel", config: "GenerationConfig") -> Iterator[None]:
    """Replaces a model's generation_config for a while, because generate() takes unset arguments from it."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _make_row(prompt: str | Sequence[Mapping[str, JSON]], place: str) -> Row:
    if isinstance(prompt, str):
        return Row(uid=place, origin=place, prompt=prompt, answer="")
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise UserError(f"{place} is a {type(prompt).__name__}: give text, or a list of messages.")
    messages = read_messages(prompt, place)
    return Row(uid=place, origin=place, prompt=messages[-1].content, messages=messages, answer="")
