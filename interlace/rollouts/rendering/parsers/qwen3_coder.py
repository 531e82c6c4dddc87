"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder and Qwen3.5."""

import re
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.core.types import JSON
from interlace.rollouts.rendering.parsers.base import read_argument
from interlace.rollouts.rendering.parsers.qwen3 import Qwen3Parser

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderParser(Qwen3Parser):
    """Parser of calls with arguments as bare text, read by the tool's schema. An empty argument is an empty text."""

    signs = ("<tool_call>", "<function=", "<parameter=")

    def _parse_call(self, body: str, tools: Sequence[ToolSpec]) -> ToolCall:
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
