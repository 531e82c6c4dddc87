"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5 and many others."""

from collections.abc import Sequence
from typing import ClassVar

from interlace.core.messages import ToolCall, ToolSpec
from interlace.rollouts.rendering.parsers.base import (
    MarkedText,
    Parsed,
    Parser,
    between,
    json_call,
    split_thought,
    without,
)

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(Parser):
    """Parser of any number of calls, each JSON within tags."""

    tags: ClassVar[tuple[str, ...]] = (BEGIN, END)
    begins = (BEGIN,)
    signs: ClassVar[tuple[str, ...]] = (BEGIN, '"arguments"')

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        reasoning, text = None, answer.text
        if self.thoughts:
            reasoning, text = split_thought(answer, self.thoughts, in_thought=in_thought)
        found = between(text, answer.tag(BEGIN), answer.tag(END))
        calls = [
            self._parse_call(answer.plain(body), tools)
            if is_closed
            else ToolCall(name="", error=f"The call does not end with {END}.")
            for body, is_closed, _ in found
        ]
        content = answer.plain(without(text, [span for _, _, span in found]) if found else text.strip())
        return Parsed(content=content, reasoning=reasoning, calls=tuple(calls))

    def _parse_call(self, body: str, tools: Sequence[ToolSpec]) -> ToolCall:
        """Reads the text between the tags of a call."""
        del tools
        return json_call(body.strip())
