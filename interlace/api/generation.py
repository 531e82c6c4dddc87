"""Responses of a trained model to prompts of a program."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import JSON, IntArray, SamplingParams
from interlace.data.config import PromptFormat
from interlace.data.formatting import Row, Write, read_messages, render, to_prompts
from interlace.engines.rollout.filters import reshape_logits, reshapes_logits
from interlace.engines.rollout.stop_strings import ends_with_text
from interlace.models.loading import count_ids
from interlace.models.size import context_length
from interlace.models.stop_tokens import list_stop_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def generate_texts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str | Sequence[Mapping[str, JSON]]],
    style: PromptFormat,
    sampling: SamplingParams,
    write: Write | None = None,
) -> list[str]:
    """Returns one response for each prompt, drawn from the distribution of the run.

    style, write: how the run writes its prompts; see to_prompts(). The model's own generation_config has no effect
    except for its end tokens, because the run did not sample by it. A response ends at the model's context. Raises
    UserError for a prompt that fills the context, and for a bias that forbids every token.
    """
    import torch

    if not prompts:
        return []
    rows = [_make_row(prompt, f"prompts[{place}]") for place, prompt in enumerate(prompts)]
    written = to_prompts(rows, [render(row, style) for row in rows], style, tokenizer, write)
    prompt_ids = [each.token_ids for each in written]
    width, context = max(map(len, prompt_ids)), context_length(model.config)
    if context is not None and width >= context:
        longest = next(row.origin for row, ids in zip(rows, prompt_ids, strict=True) if len(ids) == width)
        raise UserError(f"{longest} has {width} tokens, and the model's context {context}. Shorten the prompt.")
    if context is not None and width + sampling.max_new_tokens > context:
        sampling = sampling.model_copy(update={"max_new_tokens": context - width})
    padding = [[0] * (width - len(row)) for row in prompt_ids]  # masked, so its token has no effect
    input_ids = torch.tensor([[*pad, *row.tolist()] for pad, row in zip(padding, prompt_ids, strict=True)])
    mask = torch.tensor([[*pad, *[1] * len(row)] for pad, row in zip(padding, prompt_ids, strict=True)])
    distribution = Distribution(sampling, prompt_ids, width, count_ids(tokenizer))
    ends = ResponseEnds(sampling, tokenizer, width, {*list_stop_tokens(model, tokenizer), *sampling.stop_token_ids})
    with torch.inference_mode(), _generate_by(model, _to_generation_config(sampling)):
        tokens = model.generate(  # type: ignore[operator]  # their own stub
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=[distribution],
            stopping_criteria=[ends],
        )
    responses = [row[width : ends.found.get(place)] for place, row in enumerate(tokens.tolist())]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in responses]


class Distribution:
    """Changes logits as the native engine does: biases, penalties, min_p, and no ids beyond the tokenizer's last token.

    transformers calls it before temperature, top_k and top_p. Its own repetition penalty also counts padding, and its
    own min_p comes after top_p, which gives another distribution.
    """

    def __init__(self, sampling: SamplingParams, prompt_ids: Sequence[IntArray], width: int, num_drawable: int) -> None:
        """width: padded length of the prompts."""
        self._sampling, self._width, self._num_drawable = sampling, width, num_drawable
        self._prompts = [ids.astype(np.int64) for ids in prompt_ids]

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        """Returns new logits [N, V]. input_ids: [N, tokens so far]."""
        scores = scores.clone()
        drawable = scores[:, : self._num_drawable]
        scores[:, self._num_drawable :] = -math.inf
        if reshapes_logits(self._sampling):
            self._reshape_rows(drawable, input_ids)
        if self._sampling.temperature > 0 and self._sampling.min_p > 0:
            least = drawable.amax(-1, keepdim=True) + self._sampling.temperature * math.log(self._sampling.min_p)
            drawable[drawable < least] = -math.inf
        return scores

    def _reshape_rows(self, drawable: "Tensor", input_ids: "Tensor") -> None:
        """Applies biases and penalties to logits [N, V], in place."""
        generated = input_ids[:, self._width :].cpu().numpy()
        for row, prompt in enumerate(self._prompts):
            drawable[row] = reshape_logits(drawable[row], self._sampling, prompt, generated[row])
        if bool((drawable.amax(-1) == -math.inf).any()):
            raise UserError("logit_bias forbids all tokens. Leave at least one without -inf.")


class ResponseEnds:
    """Ends each response after an end token or a stop string, as the native engine does."""

    def __init__(
        self, sampling: SamplingParams, tokenizer: "PreTrainedTokenizerBase", width: int, stop_ids: Collection[int]
    ) -> None:
        """width: padded length of the prompts."""
        self._stops, self._tokenizer, self._width, self._stop_ids = sampling.stop, tokenizer, width, stop_ids
        self.found: dict[int, int] = {}
        """Number of a row that has ended -> its tokens, prompt and padding included."""

    def __call__(self, input_ids: "Tensor", _scores: "Tensor") -> "Tensor":
        """Returns which rows have ended, [N]. input_ids: [N, tokens so far]."""
        import torch

        rows = input_ids.tolist()
        for place, row in enumerate(rows):
            if place not in self.found and self._ends_here(row[self._width :]):
                self.found[place] = len(row)
        return torch.tensor([place in self.found for place in range(len(rows))], device=input_ids.device)

    def _ends_here(self, response: list[int]) -> bool:
        if response[-1] in self._stop_ids:
            return True
        return bool(self._stops) and ends_with_text(response, self._stops, self._tokenizer)


def _to_generation_config(sampling: SamplingParams) -> "GenerationConfig":
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False, pad_token_id=0)
    if sampling.temperature > 0:
        config.update(
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
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
