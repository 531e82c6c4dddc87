"""Route of Anthropic's messages."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import dropwhile

from interlace.agents.server.ask import (
    Answers,
    Ask,
    cached_tokens,
    calls_of,
    check_tools,
    details_of,
    finish_of,
    make_shown_message,
)
from interlace.agents.server.body import ApiError, Body
from interlace.agents.server.dialect import AnswerStream, Dialect, Event, TextStream
from interlace.agents.server.requests import AnthropicMessage, AnthropicTool, CountRequest, MessagesRequest
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import JSON

_OWN_BLOCKS = {"tool_use": "assistant", "tool_result": "user"}
"""Role of the messages that may have a type of block; text may be in all."""
_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class AnthropicMessages(Dialect):
    """`/v1/messages`."""

    prefix = "msg_"

    def read(self, body: Body) -> Ask:
        request = body.read(MessagesRequest)
        counted = count_ask(request)
        return replace(
            request.begin_ask(counted.context),
            tools=counted.tools,
            one_call=counted.one_call,
            max_tokens=request.max_tokens,
            stop=tuple(request.stop_sequences or ()),
        )

    def write(self, answer: Answers) -> dict[str, JSON]:
        return {
            **_make_head(answer),
            "content": _make_blocks(answer),
            "stop_reason": _format_reason(answer),
            "stop_sequence": _find_stop(answer),
            "usage": _count_usage(answer),
            **details_of(answer),
        }

    def stream(self, head: Answers) -> AnswerStream:
        return _MessageStream(head)

    def error(self, error: ApiError) -> dict[str, JSON]:
        return _format_error(error)


def _format_error(error: ApiError) -> dict[str, JSON]:
    fields: dict[str, JSON] = {"type": error.kind, "message": str(error)}
    return {"type": "error", "error": fields}


class _MessageStream(TextStream):
    def end(self, answer: Answers) -> Iterator[Event]:
        yield from self._begin(answer.num_prompt_tokens)
        for place, block in enumerate(_make_blocks(answer)):
            assert isinstance(block, dict)
            if block["type"] == "text":
                yield from self._text(self._sent.finish(str(block["text"])))
            else:
                yield _make_event("content_block_start", index=place, content_block={**block, "input": {}})
                delta: dict[str, JSON] = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _make_event("content_block_delta", index=place, delta=delta)
            yield _make_event("content_block_stop", index=place)
        ended: dict[str, JSON] = {"stop_reason": _format_reason(answer), "stop_sequence": _find_stop(answer)}
        yield _make_event("message_delta", delta=ended, usage=_count_usage(answer))
        yield _make_event("message_stop")

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield "error", _format_error(error)

    def _write_head(self, num_prompt_tokens: int) -> Iterator[Event]:
        usage: dict[str, JSON] = {
            "input_tokens": num_prompt_tokens, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }  # fmt: skip
        head = _make_head(self._answer)
        yield _make_event(
            "message_start",
            message={**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage},
        )

    def _text(self, new: str) -> Iterator[Event]:
        if not self._is_text_open:
            self._is_text_open = True
            yield _make_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if new:
            yield _make_event("content_block_delta", index=0, delta={"type": "text_delta", "text": new})


def _make_event(kind: str, **fields: JSON) -> Event:
    return kind, {"type": kind, **fields}


def count_ask(request: CountRequest) -> Ask:
    """Returns the conversation and the tools of a request."""
    messages = [Message(role="system", content=request.system)] if request.system else []
    for place, one in enumerate(request.messages):
        messages += _read_messages(one, f"messages[{place}]")
    messages = _join_systems(messages)
    choice = request.tool_choice.type if request.tool_choice else "auto"
    tools = [] if choice == "none" else [_read_tool(tool) for tool in request.tools or ()]
    one_call = bool(request.tool_choice and request.tool_choice.disable_parallel_tool_use)
    return Ask(context=tuple(messages), tools=check_tools(tools), model=request.model or "", one_call=one_call)


def _join_systems(messages: list[Message]) -> list[Message]:
    """Joins the system messages at the beginning: chat templates write one."""
    others = list(dropwhile(lambda message: message.role == "system", messages))
    first = messages[: len(messages) - len(others)]
    if not first:
        return others
    return [Message(role="system", content="\n\n".join(message.content for message in first)), *others]


def _read_messages(given: AnthropicMessage, where: str) -> list[Message]:
    """Reads one message. Its tool results come first, each as a separate message."""
    results, texts, calls = [], [], []
    for block in given.content:
        if block.type in _OWN_BLOCKS and given.role != _OWN_BLOCKS[block.type]:
            whose = f"{where} is of the role {given.role} and has a block of type {block.type!r}"
            raise ApiError(400, f"{whose}: put it into a message of the role {_OWN_BLOCKS[block.type]}.", param=where)
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            calls.append(ToolCall(id=block.id, name=block.name, arguments=block.input))
        elif block.type == "tool_result":
            results.append(Message(role="tool", content=block.content or "", tool_call_id=block.tool_use_id))
        elif block.type not in ("thinking", "redacted_thinking"):  # the model does not read its earlier thoughts again
            raise ApiError(400, f"{where} has a block of type {block.type!r}: only text and tools can be read.")
    if texts or calls or not results:
        results.append(Message(role=given.role, content="".join(texts), tool_calls=tuple(calls)))
    return results


def _read_tool(tool: AnthropicTool) -> ToolSpec:
    return ToolSpec(name=tool.name, description=tool.description or "", parameters=tool.input_schema)


def _make_head(answer: Answers) -> dict[str, JSON]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.ask.model}


def _make_blocks(answer: Answers) -> list[JSON]:
    message = make_shown_message(answer.turns[0], answer.ask)
    calls = calls_of(message)
    found: list[JSON] = []
    if message.content or not calls:
        found.append({"type": "text", "text": message.content})
    found += [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in calls]
    return found


def _find_stop(answer: Answers) -> str | None:
    """Returns the client's stop text that ended the answer. The content lacks one that is white space at its end."""
    return next((stop for stop in answer.ask.stop if stop in answer.turns[0].text), None)


def _format_reason(answer: Answers) -> str:
    return "stop_sequence" if _find_stop(answer) else _REASONS[finish_of(answer.turns[0], answer.ask)]


def _count_usage(answer: Answers) -> dict[str, JSON]:
    cached = cached_tokens(answer)
    return {
        "input_tokens": answer.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.num_drawn_tokens,
    }
