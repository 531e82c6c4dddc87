"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder and Qwen3.5."""

import re
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.core.types import JSON
from interlace.rollouts.rendering.parsers.base import (
    MarkedText,
    Parsed,
    Parser,
    between,
    read_argument,
    split_thought,
    without,
)

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderParser(Parser):
    """Parser of calls with arguments as bare text, read by the tool's schema. An empty argument is an empty text."""

    thoughts = ("<think>", "</think>")
    tags = (BEGIN, END, "<think>", "</think>")
    signs = (BEGIN, "<function=", "<parameter=")

    def call_tags(self, tools: Sequence[ToolSpec]) -> Sequence[str]:
        del tools
        return (BEGIN,)

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        reasoning, text = split_thought(answer, self.thoughts, in_thought=in_thought)
        found = between(text, answer.tag(BEGIN), answer.tag(END))
        calls = [
            _parse_call(answer.plain(body), tools)
            if is_closed
            else ToolCall(name="", error=f"The call does not end with {END}.")
            for body, is_closed, _ in found
        ]
        content = answer.plain(without(text, [span for _, _, span in found]) if found else text.strip())
        return Parsed(content=content, reasoning=reasoning, calls=tuple(calls))


def _parse_call(body: str, tools: Sequence[ToolSpec]) -> ToolCall:
    match = FUNCTION.fullmatch(body)
    if not match:
        return ToolCall(name="", error="The call is not of the form <function=name>...</function>.")
    name = match[1].strip()
    tool = next((tool for tool in tools if tool.name == name), ToolSpec(name=name))
    arguments: dict[str, JSON] = {}
    for key, value in PARAMETER.findall(match[2]):
        arguments[key.strip()] = read_argument(value, tool.properties.get(key.strip()), tool.definitions)
    if PARAMETER.sub("", match[2]).strip():
        return ToolCall(name=name, error="A parameter is not of the form <parameter=key>value</parameter>.")
    return ToolCall(name=name, arguments=arguments)
