"""Responses of a trained model to prompts of a program."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.data.chat import read_messages
from interlace.data.config import PromptFormat
from interlace.data.formatting import render, to_prompts
from interlace.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate_texts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str | Sequence[Mapping[str, JSON]]],
    style: PromptFormat,
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """Returns one response for each prompt. style: how the run writes its prompts. temperature 0: greedy."""
    import torch

    if not prompts:
        return []
    rows = [_make_row(prompt, f"prompts[{place}]") for place, prompt in enumerate(prompts)]
    ids = [each.token_ids.tolist() for each in to_prompts(rows, [render(row, style) for row in rows], style, tokenizer)]
    width = max(map(len, ids))
    pad = next(each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if isinstance(each, int))
    input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        written = model.generate(  # type: ignore[operator]  # transformers' own stub
            input_ids=input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling
        )
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in written[:, width:]]


def _make_row(prompt: str | Sequence[Mapping[str, JSON]], place: str) -> Row:
    if isinstance(prompt, str):
        return Row(uid=place, origin=place, prompt=prompt, answer="")
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise UserError(f"{place} is a {type(prompt).__name__}: give text, or a list of messages.")
    messages = read_messages(prompt, place)
    return Row(uid=place, origin=place, prompt=messages[-1].content, messages=messages, answer="")
