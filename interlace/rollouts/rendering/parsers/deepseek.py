"""Format of DeepSeek's models, with special tags: `NAME<sep>{...}`, or in V3 and R1 `function<sep>NAME` and a fence."""

import json
import re
from collections.abc import Sequence

from interlace.core.messages import ToolCall, ToolSpec
from interlace.rollouts.rendering.parsers.base import MarkedText, Parsed, Parser, between, json_call, split_thought

BEGIN, END, CALL, SEPARATOR, CALL_END = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


class DeepSeekParser(Parser):
    """Parser of thoughts, content and calls in this order. Text after the calls is ignored."""

    thoughts = ("<think>", "</think>")
    tags = (BEGIN, END, CALL, SEPARATOR, CALL_END, "<think>", "</think>")
    begins = (BEGIN,)
    signs = (BEGIN, SEPARATOR)

    def parse(self, answer: MarkedText, tools: Sequence[ToolSpec], *, in_thought: bool = False) -> Parsed:
        del tools
        assert self.thoughts
        reasoning, text = split_thought(answer, self.thoughts, in_thought=in_thought)
        content, begins, body = text.partition(answer.tag(BEGIN))
        found = between(body, answer.tag(CALL), answer.tag(CALL_END))
        calls = [_parse_call(one, answer) if is_closed else _report_broken(CALL_END) for one, is_closed, _ in found]
        if begins and not calls:
            calls = [ToolCall(name="", error="There is no call after the tag that begins calls.")]
        return Parsed(content=answer.plain(content).strip(), reasoning=reasoning, calls=tuple(calls))


def _parse_call(body: str, answer: MarkedText) -> ToolCall:
    name, separator, arguments = body.partition(answer.tag(SEPARATOR))
    if not separator:
        return _report_broken(SEPARATOR)
    name, arguments = answer.plain(name).strip(), answer.plain(arguments)
    if fenced := FENCED.fullmatch(arguments.strip()):
        name, arguments = fenced[1].strip(), fenced[2]
    return json_call(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip()}}}')


def _report_broken(tag: str) -> ToolCall:
    return ToolCall(name="", error=f"The call has no {tag}.")
