"""Conversations of one sample: finds the earlier turn that a list of messages continues, and reuses its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.messages import Message, ToolSpec, same_message
from interlace.core.types import IntArray
from interlace.rollouts.rendering.base import Renderer


@dataclass(frozen=True, slots=True)
class _Past:
    messages: tuple[Message, ...]
    """Messages of the conversation, ending with the model's answer."""
    tools: tuple[ToolSpec, ...]
    renderer: Renderer
    token_ids: IntArray
    """Tokens of the messages, as the model read and sampled them."""


class History:
    """Stores the tokens of each turn of a sample, so that later turns reuse them instead of tokenizing text again."""

    def __init__(self) -> None:
        self._turns: list[_Past] = []

    def context(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the tokens of a conversation.

        They begin with the tokens of the longest earlier turn with which the conversation begins and that has the same
        renderer and tools. Without such a turn the whole conversation is rendered.
        """
        for past in sorted(self._turns, key=lambda past: -len(past.messages)):
            if past.renderer is renderer and past.tools == tuple(tools) and _begins_with(messages, past.messages):
                new = messages[len(past.messages) :]
                found = renderer.extend(past.token_ids.tolist(), past.messages[-1], new, tools) if new else None
                if found is not None:
                    return found
        return renderer.render(messages, tools)

    def add_turn(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        answer: Message,
        token_ids: IntArray,
    ) -> None:
        """Stores a turn. token_ids: tokens of the whole context and the answer."""
        self._turns.append(_Past((*messages, answer), tuple(tools), renderer, token_ids))


def _begins_with(messages: Sequence[Message], with_: Sequence[Message]) -> bool:
    if len(messages) < len(with_):
        return False
    return all(same_message(one, other) for one, other in zip(messages, with_, strict=False))
