"""A bare JSON object, `{"name": ..., "parameters": {...}}`: Llama 3.1 and 3.2."""

import json
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.rollouts.rendering.parsers.base import MarkedText, Parsed, Parser, json_call

TAG = "<|python_tag|>"
SIGNS = ('{"name":', '{"type":"function"')
"""Possible beginnings of a call without a tag, with spaces removed."""


class Llama3Parser(Parser):
    """Parser of answers that consist of one or more consecutive calls. Any other answer is content."""

    tags = begins = (TAG,)
    signs = ('"parameters": ', "ipython")

    def begun(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        compact = _compact_body(answer.text.strip())
        if tools and any(sign.startswith(compact) or compact.startswith(sign) for sign in SIGNS):
            return Parsed(content="")
        return super().begun(answer, tools, in_thought=in_thought)

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        del in_thought
        text, tag = answer.text.strip(), answer.tag(TAG)
        is_tagged = text.startswith(tag)
        body = answer.plain(text.removeprefix(tag)).strip()
        if not is_tagged and not _begins_as_call(body, tools):
            return Parsed(content=answer.plain(text))
        return Parsed(content="", calls=tuple(_parse_calls(body)))


def _begins_as_call(body: str, tools: Sequence[ToolSpec]) -> bool:
    return bool(tools) and _compact_body(body).startswith(SIGNS)


def _compact_body(body: str) -> str:
    return body[:200].replace(" ", "").replace("\n", "")


def _parse_calls(body: str) -> list[ToolCall]:
    found: list[ToolCall] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            _, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            return [*found, json_call(body[place:])]
        found.append(json_call(body[place:end]))
        place = end
        while place < len(body) and body[place] in " \n\r\t;,":
            place += 1
    return found or [ToolCall(name="", error="The call is empty.")]
