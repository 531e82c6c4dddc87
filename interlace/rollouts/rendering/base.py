"""Interface between messages and tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from interlace.core.messages import Message, ToolSpec
from interlace.core.types import JSON, IntArray


class Renderer(Protocol):
    """Renders conversations as tokens of one model, and parses its answers. Conversations may share a renderer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def longest_token(self) -> int:
        """Upper bound of the characters that one token stands for."""
        ...

    def variant(self, variables: Mapping[str, JSON]) -> "Renderer":
        """Returns the renderer with further variables for the template: the same object for the same variables."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes a whole conversation and the beginning of the answer. UserError if the template refuses it."""
        ...

    def answer(self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes an answer to `messages` as the model would sample it, including its end token: an example."""
        ...

    def parse(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | IntArray = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """Reads an answer: content, reasoning, tool calls. prompt_ids: the context of the answer."""
        ...

    def begun(self, token_ids: Sequence[int], *, tools: Sequence[ToolSpec] = ()) -> Message:
        """Reads an incomplete answer: the reasoning and the content that no further token can change, without calls.

        The content of the complete answer begins with this content, except for an incomplete character at its end.
        """
        ...

    def extend(
        self,
        previous_ids: Sequence[int],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Appends `new_messages` to tokens that end with an answer of the model.

        answer: the message that was read from these tokens. An answer that was cut gets the tokens that close it.
        Returns the whole context, which begins with `previous_ids`; None if the template requires that the whole
        conversation is written again.
        """
        ...
