"""Conversations of one sample: which earlier turn a list of messages goes on behind, and so which tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.messages import Message, ToolSpec, same_message
from interlace.rollouts.rendering.base import Renderer


@dataclass(frozen=True, slots=True)
class _Past:
    messages: tuple[Message, ...]
    """Messages of the conversation, the model's answer last."""
    tools: tuple[ToolSpec, ...]
    renderer: Renderer
    token_ids: list[int]
    """Tokens of these, as the model was given and drew them."""


class History:
    """Tokens of each turn of a sample, kept so that no later turn writes them again from text."""

    def __init__(self) -> None:
        self._turns: list[_Past] = []

    def context(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the tokens of a conversation.

        They begin with the tokens of the longest earlier turn that the conversation begins with and that the same
        renderer wrote. Without such a turn the whole conversation is written.
        """
        for past in sorted(self._turns, key=lambda past: -len(past.messages)):
            if past.renderer is renderer and past.tools == tuple(tools) and _begins(messages, past.messages):
                new = messages[len(past.messages) :]
                found = renderer.extend(past.token_ids, past.messages[-1], new, tools) if new else None
                if found is not None:
                    return found
        return renderer.render(messages, tools)

    def add_turn(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        answer: Message,
        token_ids: list[int],
    ) -> None:
        """Keeps a turn. token_ids: the whole context and the answer's tokens."""
        self._turns.append(_Past((*messages, answer), tuple(tools), renderer, token_ids))


def _begins(messages: Sequence[Message], with_: Sequence[Message]) -> bool:
    if len(messages) < len(with_):
        return False
    return all(same_message(one, other) for one, other in zip(messages, with_, strict=False))
