"""Conversion of a turn's context to the token ids of its request, with the tokens of earlier turns."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from interlace.core.errors import ContextFullError, UserError
from interlace.core.messages import Message, ToolSpec, as_message, same_message
from interlace.core.sampling import LARGEST_INT32
from interlace.core.types import JSON, IntArray, SamplingParams
from interlace.rollouts.base import Context, Turn
from interlace.rollouts.rendering.chat_template import Renderer

LONG_TEXT = 1 << 14
"""Characters of a conversation and its tools from which they are rendered and tokenized on a thread."""
_PER_VALUE = 32
"""Characters for which each message, and each value in a call or a tool, counts in addition to its text."""


@dataclass(frozen=True, slots=True)
class _Past:
    messages: tuple[Message, ...]
    """Messages of the conversation, ending with the model's answer."""
    tools: tuple[ToolSpec, ...]
    renderer: Renderer
    token_ids: IntArray
    """Tokens of the messages, as the model read and sampled them."""


def _begins_with(messages: Sequence[Message], with_: Sequence[Message]) -> bool:
    if len(messages) < len(with_):
        return False
    return all(same_message(one, other) for one, other in zip(messages, with_, strict=False))


class ContextEncoder:
    """Encodes the contexts of one session, and checks that an engine has room for them.

    Messages that continue an earlier turn reuse its tokens instead of tokenizing text again.
    """

    def __init__(self, renderer: Renderer | None, *, max_tokens: int | None) -> None:
        """renderer: None if episodes work on token ids only. max_tokens: tokens of the longest sequence."""
        self._renderer, self._max_tokens = renderer, max_tokens
        self._turns: list[_Past] = []

    async def vary_renderer(self, variables: Mapping[str, JSON]) -> Renderer | None:
        """Returns the renderer for a template's variables; it is made on a thread."""
        if not variables or self._renderer is None:
            return self._renderer
        return await asyncio.to_thread(self._renderer.variant, variables)

    async def encode(
        self,
        context: Context,
        messages: tuple[Message, ...] | None,
        tools: tuple[ToolSpec, ...],
        number: int,
        renderer: Renderer | None,
    ) -> IntArray:
        """Returns the token ids of a context. Raises UserError for a context that is not valid for a turn.

        messages: the context's messages, or None if it contains token ids. number: number of the turn, for messages.
        """
        if messages is None:
            return self._check_ids(context, number)
        rendered = await self._render_messages(renderer, messages, tools, number)
        return np.asarray(rendered, np.int32)

    async def _render_messages(
        self, renderer: Renderer | None, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], number: int
    ) -> list[int]:
        """Writes messages as tokens. A long text is written on a thread: the event loop serves others meanwhile."""
        if renderer is None:
            raise UserError(
                "the episode passed messages, but the tokenizer has no chat template to render them. Take an instruct "
                "model or its tokenizer (model.tokenizer), or pass token ids."
            )
        # A template may leave out parts of earlier answers, so their length proves nothing.
        num_given = sum(len(message.content) for message in messages if message.role != "assistant")
        self.check_length(-(-num_given // renderer.longest_token), number, "at least ")
        if not is_long(messages, tools):
            return self._continue_turn(renderer, messages, tools)
        return await asyncio.to_thread(self._continue_turn, renderer, messages, tools)

    def _continue_turn(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Returns the tokens of a conversation.

        They begin with the tokens of the longest earlier turn with which the conversation begins and that has the same
        renderer and tools. Without such a turn the whole conversation is rendered.
        """
        for past in sorted(self._turns, key=lambda past: -len(past.messages)):
            if past.renderer is renderer and past.tools == tools and _begins_with(messages, past.messages):
                new = messages[len(past.messages) :]
                found = renderer.extend(past.token_ids.tolist(), past.messages[-1], new, tools) if new else None
                if found is not None:
                    return found
        return renderer.render(messages, tools)

    def _check_ids(self, token_ids: Context, number: int) -> IntArray:
        self.check_length(len(token_ids), number)
        found = np.asarray(token_ids)
        is_list = found.ndim == 1 and found.size and found.dtype.kind in "iu"
        if not is_list or found.min() < 0 or found.max() > LARGEST_INT32:
            raise UserError(
                f"generate() was given a {type(token_ids).__name__} that is not a list of token ids. It takes the "
                f"whole context, at least one token, with ids from 0 to {LARGEST_INT32}, or messages."
            )
        return found.astype(np.int32)

    def check_length(self, num_tokens: int, number: int, bound: str = "") -> None:
        """Raises ContextFullError if a context leaves no room for an answer. bound: words before the number."""
        most = self._max_tokens
        if most is not None and num_tokens >= most:
            raise ContextFullError(
                f"the context of turn {number} has {bound}{num_tokens} tokens, and an engine holds {most} of one "
                "sequence. Raise rollout.max_tokens if the model's context is longer, or end the episode sooner."
            )

    def limit_params(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Lowers the limit of new tokens to the room that a context of `num_tokens` tokens leaves."""
        if self._max_tokens is None or params.max_new_tokens <= self._max_tokens - num_tokens:
            return params
        return params.model_copy(update={"max_new_tokens": self._max_tokens - num_tokens})

    def add_turn(
        self, turn: Turn, messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer | None
    ) -> None:
        if renderer:
            tokens = np.concatenate([turn.prompt_ids, turn.token_ids])
            self._turns.append(_Past((*messages, turn.message), tuple(tools), renderer, tokens))


def is_long(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
    """Returns whether a conversation and its tools have LONG_TEXT characters or more."""
    parts: list[JSON] = []
    for message in messages:
        parts += [message.content, message.reasoning, *(call.arguments for call in message.tool_calls)]
        if len(parts) * _PER_VALUE >= LONG_TEXT:
            return True
    for tool in tools:
        parts += [tool.name, tool.description, tool.parameters]
    left = LONG_TEXT
    while parts and left > 0:
        part = parts.pop()
        left -= _PER_VALUE + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return left <= 0


def read_messages(context: Context) -> tuple[Message, ...] | None:
    """Returns the messages of a context, or None if it contains token ids. UserError for anything else."""
    if not len(context) or not isinstance(context[0], Message | Mapping):
        return None
    given = cast(Sequence[Message], context)
    return tuple(as_message(each, f"message {place} of generate()") for place, each in enumerate(given, start=1))
