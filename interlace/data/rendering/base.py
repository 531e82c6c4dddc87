"""Interface between messages and tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from interlace.core.messages import Message, ToolSpec
from interlace.core.types import JSON


class Renderer(Protocol):
    """Writer of conversations as one model's tokens, and reader of its answers. Safe to be shared by conversations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def longest_token(self) -> int:
        """Upper bound of the characters that one token stands for."""
        ...

    def variant(self, variables: Mapping[str, JSON]) -> "Renderer":
        """Returns the renderer whose template reads further variables: the same object for the same variables."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes a whole conversation, up to where the model goes on. UserError for what the template refuses."""
        ...

    def answer(self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes an answer behind `messages`, as the model would draw it, its end included: an example."""
        ...

    def parse(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """Reads an answer: content, reasoning, tool calls. prompt_ids: the context it was drawn behind."""
        ...

    def begun(self, token_ids: Sequence[int], *, tools: Sequence[ToolSpec] = ()) -> Message:
        """Reads an answer that goes on: the reasoning and the content that no further token can change, without calls.

        The content of the whole answer begins with this one's, but for a part of a character at its end.
        """
        ...

    def extend(
        self,
        previous_ids: Sequence[int],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Writes `new_messages` behind tokens that end with an answer of the model, without touching them.

        answer: the message that was read from these tokens. An answer that was cut gets the tokens that close it.
        Returns the whole context, which begins with `previous_ids`; None where the template allows it to be written
        from the beginning only.
        """
        ...
