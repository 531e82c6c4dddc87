"""Conversations of one sample: which earlier turn a list of messages goes on behind, and so which tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.messages import Message, ToolSpec, same_message
from interlace.data.rendering.base import Renderer


@dataclass(frozen=True, slots=True)
class _Past:
    messages: tuple[Message, ...]
    """Messages of the conversation, the model's answer last."""
    tools: tuple[ToolSpec, ...]
    token_ids: list[int]
    """Tokens of these, as the model was given and drew them."""


class History:
    """Tokens of each turn of a sample, kept so that no later turn writes them again from text."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[_Past] = []

    def context(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the tokens of a conversation: behind the longest earlier turn that it begins with, else written."""
        for past in sorted(self._turns, key=lambda past: -len(past.messages)):
            if past.tools == tuple(tools) and _begins(messages, past.messages):
                new = messages[len(past.messages) :]
                found = self._renderer.extend(past.token_ids, past.messages[-1], new, tools) if new else None
                if found is not None:
                    return found
        return self._renderer.render(messages, tools)

    def answered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], answer: Message, token_ids: list[int]
    ) -> None:
        """Keeps a turn. token_ids: the whole context and what the model drew behind it."""
        self._turns.append(_Past((*messages, answer), tuple(tools), token_ids))


def _begins(messages: Sequence[Message], with_: Sequence[Message]) -> bool:
    if len(messages) < len(with_):
        return False
    return all(same_message(one, other) for one, other in zip(messages, with_, strict=False))
