"""Rewards by a model: a sequence classifier with one output reads prompt and response."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.messages import to_mapping, tool_mapping
from interlace.core.prompts import plain_text
from interlace.core.state_parts import WEIGHTS
from interlace.core.types import Prompt, RewardResult, Sample
from interlace.models.classifier import load_classifier
from interlace.models.residence import Residence
from interlace.models.token_text import TypedTags, special_tags
from interlace.rewards.base import add_turn_rewards
from interlace.rewards.config import MODEL, RewardConfig
from interlace.rewards.shaping import shape_result

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class ModelScorer:
    """Scores samples by the configured model, many in one forward."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        device: str,
        system_of: Callable[[Prompt], str | None] = lambda _: None,
    ) -> None:
        """Raises UserError if the model cannot be loaded, or has another head.

        device: as torch names it. system_of: returns the system message of the recipe for a prompt.
        """
        if config.model is None:
            raise ValueError(f"reward {config.name!r} is no model")
        self._config, self._settings, self._device, self._system_of = config, config.model, device, system_of
        loaded = load_classifier(config.model)
        self._model, self._tokenizer, self._context = loaded.model, loaded.tokenizer, loaded.context
        self._tags = special_tags(self._tokenizer)
        self._model.to(device)  # type: ignore[arg-type]  # transformers' own stub
        self.residence = Residence(self._model.device, {WEIGHTS: self._model._apply})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._model.state_dict().values())

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result a sample, in their order. A sample that the model cannot read or score fails alone."""
        ids: list[list[int]] = []
        found: list[RewardResult] = []
        readable: list[int] = []
        for row, sample in enumerate(samples):
            tokens, unread = self._tokenize_sample(sample)
            ids.append(tokens)
            found.append(RewardResult(failure=unread))
            if unread is None:
                readable.append(row)
        for rows in _split_batches(readable, [len(tokens) for tokens in ids], self._settings.tokens_per_batch):
            for row, number in zip(rows, self._compute_numbers([ids[row] for row in rows]).tolist(), strict=True):
                found[row] = (
                    RewardResult(reward=number, parts={MODEL: number})
                    if math.isfinite(number)
                    else RewardResult(failure=f"the reward model gave {number}")
                )
        return [
            shape_result(add_turn_rewards(result, sample.outcome), sample.sampled_ids, self._config.shaping)
            for result, sample in zip(found, samples, strict=True)
        ]

    def _tokenize_sample(self, sample: Sample) -> tuple[list[int], str | None]:
        """Returns the tokens of a sample, and the reason why the model cannot read them; None if it can."""
        chat, system = self._settings.chat_template, self._system_of(sample.prompt)
        try:
            tokens = _encode_text(
                self._tokenizer, self._tags, sample.prompt, sample.text, chat_template=chat, system=system
            )
        except UserError as error:
            return [], str(error)
        if self._context is not None and len(tokens) > self._context:
            return tokens, f"{len(tokens)} tokens, and the reward model reads {self._context}"
        return tokens, None

    def _compute_numbers(self, rows: Sequence[Sequence[int]]) -> "Tensor":
        """Computes [texts] the model's numbers, in float32."""
        import torch

        width, pad = max(map(len, rows)), self._tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self._device)
        sizes = torch.tensor([len(row) for row in rows], device=self._device)
        mask = torch.arange(width, device=self._device) < sizes[:, None]
        with torch.inference_mode():
            logits: Tensor = self._model(ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[:, 0].float().cpu()


def encode_scored(
    tokenizer: "PreTrainedTokenizerBase",
    tags: TypedTags,
    prompt: Prompt,
    response: str,
    *,
    chat_template: bool,
    system: str | None = None,
) -> list[int]:
    """Returns the tokens of a prompt and a response up to the one at which transformers' classifiers compute the score.

    That is the last token which is not the pad token: if the end token is the pad token, it is the token before the end
    token. tags: the special tokens of the tokenizer. chat_template: writes the conversation by the chat template of the
    tokenizer, if it has one. system: the recipe's system message, which a chat's messages contain already. Raises
    UserError if the template refuses the conversation.
    """
    tokens = _encode_text(tokenizer, tags, prompt, response, chat_template=chat_template, system=system)
    read = [place for place, token in enumerate(tokens, start=1) if token != tokenizer.pad_token_id]
    return tokens[: read[-1] if read else 1]


def _encode_text(
    tokenizer: "PreTrainedTokenizerBase",
    tags: TypedTags,
    prompt: Prompt,
    response: str,
    *,
    chat_template: bool,
    system: str | None,
) -> list[int]:
    """Returns all tokens of a prompt and a response. Arguments and errors as of encode_scored().

    The chat template gets the tools of the prompt. In a chat, a special token that a text spells is read as text, so
    that a response cannot contain further turns. Without a chat template, the tokenizer reads it as the special token.
    """
    if not (chat_template and tokenizer.chat_template):
        return list(tokenizer(plain_text(prompt, system) + response)["input_ids"])
    conversation = [to_mapping(message) for message in prompt.messages] or [
        *([{"role": "system", "content": system}] if system is not None else ()),
        {"role": "user", "content": prompt.text},
    ]
    turns = [*map(tags.hold_message, conversation), {"role": "assistant", "content": tags.hold(response)}]
    tools = [tags.hold(tool_mapping(tool)) for tool in prompt.tools] or None
    # The template writes the special tokens, so it makes text first. Its annotation has no messages with calls.
    try:
        text = str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))  # type: ignore[arg-type]
    except Exception as error:  # a template is a program, which may raise any error
        raise UserError(f"the reward model's chat template: {str(error)[:500] or type(error).__name__}") from error
    return tags.encode(text)


def _split_batches(rows: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Rows of similar length together, longest first; at most `budget` tokens a batch, padding counted."""
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
