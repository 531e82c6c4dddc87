"""`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral's models."""

import json
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.rollouts.rendering.parsers.base import MarkedText, Parsed, Parser, json_call

BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class MistralParser(Parser):
    """Parser of content and then calls: one list of calls (up to Mistral Nemo), or a tag before each call (later)."""

    tags = (BEGIN, ARGUMENTS)
    begins = (BEGIN,)
    signs = (BEGIN,)

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        del tools, in_thought
        content, *bodies = answer.text.split(answer.tag(BEGIN))
        calls = [call for body in bodies for call in _parse_calls(body.strip(), answer)]
        return Parsed(content=answer.plain(content).strip(), calls=tuple(calls))


def _parse_calls(body: str, answer: MarkedText) -> list[ToolCall]:
    name, tag, arguments = body.partition(answer.tag(ARGUMENTS))
    if tag:
        return [json_call(f'{{"name": {json.dumps(name.strip())}, "arguments": {answer.plain(arguments)}}}')]
    try:
        found = json.loads(answer.plain(body))
    except (ValueError, RecursionError) as error:
        return [ToolCall(name="", error=f"The calls are not valid JSON: {error}.")]
    if not isinstance(found, list) or not found:
        return [ToolCall(name="", error='The calls are not of the form [{"name": ..., "arguments": {...}}].')]
    return [json_call(json.dumps(each)) for each in found]
