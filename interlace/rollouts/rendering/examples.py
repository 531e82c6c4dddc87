"""Conversion of example conversations to tokens, turn by turn like in an episode."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolSpec
from interlace.core.types import Prompt
from interlace.rollouts.rendering.chat_template import Renderer


class ExampleWriter:
    """Converts the messages that follow a prompt to tokens."""

    def __init__(self, renderer: Renderer, tools_of: Callable[[Prompt], tuple[ToolSpec, ...]]) -> None:
        """tools_of: returns the tools that a prompt was rendered with."""
        self._renderer, self._tools_of = renderer, tools_of

    def write(self, prompt: Prompt, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns the tokens after a prompt, and for each whether it belongs to an answer of the assistant."""
        tools, said = self._tools_of(prompt), list(prompt.messages)
        ids: list[int] = prompt.token_ids.tolist()
        first, imitated, place = len(ids), [False] * len(ids), 0
        while place < len(messages):
            if messages[place].role != "assistant":
                raise UserError(
                    f"the example for {prompt.uid} has a message of {messages[place].role} before any answer."
                )
            answer = messages[place]
            try:
                drawn = self._renderer.answer(said, answer, tools)
                self._renderer.check_written(said, answer, tools, drawn)
            except UserError as error:
                raise UserError(f"the example for {prompt.uid}: {error}") from None
            ids, imitated, place = [*ids, *drawn], [*imitated, *[True] * len(drawn)], place + 1
            new = list(takewhile(lambda message: message.role != "assistant", messages[place:]))
            if new:
                longer = self._renderer.extend(ids, answer, new, tools)
                if longer is None:
                    raise UserError(
                        "under this chat template each turn is a branch, so an example of several turns is not a "
                        "single sequence. Take examples of one turn, or another model."
                    )
                imitated += [False] * (len(longer) - len(ids))
                ids, place = longer, place + len(new)
            said += [answer, *new]
        return ids[first:], imitated[first:]
