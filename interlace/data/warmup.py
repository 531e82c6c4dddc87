"""Warm-up examples: prompts with responses to imitate, drawn by key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from pydantic import Field

import interlace.data.demonstrations as builtin
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.messages import Message
from interlace.core.plugins import builtin_module, concrete_subclass, load_object
from interlace.core.random import keyed_random, permutation
from interlace.core.types import BoolArray, IntArray, Prompt
from interlace.data.config import Parameter
from interlace.data.demonstrations.base import Demonstrator
from interlace.models.token_text import encode_continuation, with_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemonstrationConfig(Config):
    """Which examples are shown."""

    style: str = "answer"
    """A module of interlace.data.demonstrations, or a Demonstrator of your own as package.module:Name."""
    settings: dict[str, Parameter] = Field(default_factory=dict)
    """Settings of the style itself."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """One example."""

    prompt: Prompt
    response_ids: IntArray
    """[L] with the end-of-sequence token; in a conversation, all tokens after the prompt."""
    imitated: BoolArray | None = None
    """[L] False on tokens that are shown only, such as a tool's answer; None imitates all."""
    checked: BoolArray | None = None
    """[L] True on tokens that the prompt determines, for an example that measures the habit; else None."""


class MessageWriter(Protocol):
    """Writer of example conversations."""

    def write(self, prompt: Prompt, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns the tokens after a prompt, and a mask of the assistant's tokens."""


class Demonstrations:
    """Example n is fixed by (seed, n): epoch after epoch over the prompts, each time with a newly drawn response."""

    def __init__(
        self,
        config: DemonstrationConfig,
        prompts: Sequence[Prompt],
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        writer: MessageWriter | None = None,
        *,
        context: int | None = None,
    ) -> None:
        """Raises UserError for an unknown style or setting, and ValueError without prompts.

        writer: writes examples that are messages; None if the run's episodes have no messages. context: largest number
        of tokens of a prompt and its response, which the model can read; None for no limit.
        """
        self._writer, self._context = writer, context
        if not prompts:
            raise ValueError("demonstrations need at least one prompt")
        self._demonstrator = load_demonstrator(config)
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int, size: int) -> list[Demonstration]:
        """Returns the `size` examples of a step; steps count from 0; with a constant `size` they follow each other."""
        prompts = [self._draw_prompt(step * size + offset) for offset in range(size)]
        return [self._encode_example(prompt, self._write_messages(prompt)) for prompt in prompts]

    def checked(self, prompts: Sequence[Prompt], count: int) -> list[Demonstration]:
        """Returns examples that measure the demonstrated habit, drawn by the seed from these prompts."""
        draws = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(count)]
        return [self._write_checked(prompt, round_) for prompt, round_ in draws]

    def _encode_text(self, text: str) -> list[int]:
        return encode_continuation(self._tokenizer, text)

    def _write_checked(self, prompt: Prompt, round_: int) -> Demonstration:
        found = self._demonstrator.write_checked(prompt, keyed_random("habit", self._seed, prompt.uid, round_))
        shown = self._encode_example(prompt, found.response)
        if isinstance(found.response, str):
            num_free = len(self._encode_text(found.free_letters)) if found.free_letters else 0
        else:
            num_free = found.free_tokens
        imitated = np.ones(len(shown.response_ids), np.bool_) if shown.imitated is None else shown.imitated
        checked = imitated & (_message_of(imitated) >= found.free_messages)
        checked[np.flatnonzero(checked)[:num_free]] = False
        return replace(shown, checked=checked)

    def _write_messages(self, prompt: Prompt) -> str | Sequence[Message]:
        rng = keyed_random("demonstration", self._seed, prompt.uid, prompt.attempt)
        found: object = self._demonstrator.write(prompt, rng)  # a user's own may return anything
        if isinstance(found, str):
            return found
        messages = [message for message in found if isinstance(message, Message)] if isinstance(found, Sequence) else []
        if not messages or len(messages) != len(cast(Sequence[object], found)) or messages[-1].role != "assistant":
            style = type(self._demonstrator).__name__
            raise UserError(
                f"demonstration style {style} wrote {found!r} for {prompt.uid}, which is no text, nor messages of "
                "which the assistant has the last."
            )
        return messages

    def _encode_example(self, prompt: Prompt, written: str | Sequence[Message]) -> Demonstration:
        if isinstance(written, str):
            ids = with_end(self._tokenizer, self._encode_text(written))
            found = Demonstration(prompt=prompt, response_ids=np.array(ids, np.int32))
        else:
            found = self._encode_conversation(prompt, written)
        size = len(prompt.token_ids) + len(found.response_ids)
        if self._context is not None and size > self._context:
            raise UserError(
                f"the demonstration of prompt {prompt.uid} has {size} tokens with its prompt, and the model's context "
                f"is {self._context}. Write shorter ones (warmup.demonstrations), drop long prompts (task.overlong), "
                "or take a model with a longer context."
            )
        return found

    def _encode_conversation(self, prompt: Prompt, messages: Sequence[Message]) -> Demonstration:
        if self._writer is None:
            raise UserError(
                f"demonstration style {type(self._demonstrator).__name__} writes messages, which an episode with tools "
                "takes and single turns do not. Set episode, or a style that writes text."
            )
        ids, imitated = self._writer.write(prompt, messages)
        return Demonstration(prompt=prompt, response_ids=np.array(ids, np.int32), imitated=np.array(imitated, np.bool_))

    def _draw_prompt(self, number: int) -> Prompt:
        epoch, position = divmod(number, len(self._prompts))
        return replace(self._prompts[self._order_epoch(epoch)[position]], attempt=epoch)

    def _order_epoch(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # One shuffle an epoch; a batch can reach over an epoch's end.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = permutation(len(self._prompts), "demonstrations", self._seed, epoch)
        return self._orders[epoch]


def _message_of(imitated: BoolArray) -> IntArray:
    """Numbers the runs of imitated tokens, [L]: the messages of the assistant, from 0."""
    starts = imitated & ~np.concatenate([[False], imitated[:-1]])
    return (np.cumsum(starts) - 1).astype(np.int32)


def load_demonstrator(config: DemonstrationConfig) -> Demonstrator:
    """Loads the writer a config names. Raises UserError for an unknown style or setting."""
    if ":" in config.style:
        found = load_object("demonstration style", config.style)
    else:
        found = builtin_module("demonstration style", builtin, config.style).Demonstrator
    kind = concrete_subclass(f"demonstration style {config.style!r}", found, Demonstrator)  # type: ignore[type-abstract]
    return kind(kind.Settings.parse(config.settings, where=f"demonstrations {config.style}"))
