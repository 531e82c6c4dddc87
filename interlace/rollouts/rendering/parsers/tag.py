"""`<name>argument</name>`: the tool's name is the tag, its argument is bare text. For models without a tool format."""

import re
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.core.types import JSON
from interlace.rollouts.rendering.parsers.base import MarkedText, Parsed, Parser, read_argument, split_thought, without


class TagParser(Parser):
    """Parser of calls of the tools in the prompt. Any other tag is content."""

    thoughts = ("<think>", "</think>")
    tags = ("<think>", "</think>")

    def call_tags(self, tools: Sequence[ToolSpec]) -> Sequence[str]:
        return [f"<{tool.name}>" for tool in tools]

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        reasoning, text = split_thought(answer, self.thoughts, in_thought=in_thought)
        calls, spans = [], []
        names = "|".join(re.escape(tool.name) for tool in tools)
        for match in re.finditer(rf"<({names})>(.*?)(</\1>|$)", text, re.DOTALL) if names else ():
            tool = next(tool for tool in tools if tool.name == match[1])
            calls.append(_parse_call(tool, answer.plain(match[2]), is_closed=bool(match[3])))
            spans.append(match.span())
        content = answer.plain(without(text, spans) if spans else text.strip())
        return Parsed(content=content, reasoning=reasoning, calls=tuple(calls))


def _parse_call(tool: ToolSpec, body: str, *, is_closed: bool) -> ToolCall:
    if not is_closed:
        return ToolCall(name=tool.name, error=f"The call does not end with </{tool.name}>.")
    arguments: dict[str, JSON] = {}
    if tool.properties:
        name, schema = next(iter(tool.properties.items()))
        arguments[name] = read_argument(body, schema, tool.definitions)
    return ToolCall(name=tool.name, arguments=arguments)
