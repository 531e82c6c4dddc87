"""Route of OpenAI's Responses API: text and tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

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
from interlace.agents.server.requests import ResponseItem, ResponsesRequest, ResponseTool
from interlace.core.messages import Message, ToolCall, ToolSpec, as_tool
from interlace.core.types import JSON


class Responses(Dialect):
    """`/v1/responses`. Each request contains the whole conversation: the server stores nothing."""

    prefix = "resp_"

    def read(self, body: Body) -> Ask:
        request = body.read(ResponsesRequest)
        messages = [Message(role="system", content=request.instructions)] if request.instructions else []
        messages += _read_messages(request.input)
        tools = [] if request.tool_choice == "none" else [_read_tool(tool) for tool in request.tools or ()]
        return replace(
            request.begin_ask(tuple(messages)),
            tools=check_tools(tools),
            one_call=request.parallel_tool_calls is False,
            max_tokens=request.max_output_tokens,
            seed=request.seed,
        )

    def write(self, answer: Answers) -> dict[str, JSON]:
        return _write_whole(answer)

    def stream(self, head: Answers) -> AnswerStream:
        return _ResponseStream(head)


def _write_whole(answer: Answers) -> dict[str, JSON]:
    is_cut = finish_of(answer.turns[0], answer.ask) == "length"
    return {
        **_make_head(answer),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _make_items(answer),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens(answer), "cache_write_tokens": 0},
            "output_tokens": answer.num_drawn_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_drawn_tokens,
        },
        **details_of(answer),
    }


def _read_messages(items: Sequence[ResponseItem]) -> list[Message]:
    """Reads the items of an input. Consecutive calls belong to one message, as the model wrote them."""
    messages: list[Message] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if item.type == "message":
            if item.role is None:
                raise ApiError(400, f"{where} has no role: write system, user or assistant.", param=f"{where}.role")
            role = "system" if item.role == "developer" else item.role
            messages.append(Message(role=role, content=item.content or ""))
        elif item.type == "function_call":
            messages.append(_with_call(messages, item.call(where)))
        elif item.type == "function_call_output":
            messages.append(Message(role="tool", content=item.output or "", tool_call_id=item.call_id))
        elif item.type != "reasoning":  # the model does not read its earlier thoughts again
            raise ApiError(400, f"{where} is of type {item.type!r}: only text and calls of functions can be read.")
    if not messages:
        raise ApiError(400, "input has no message.", param="input")
    return messages


def _with_call(messages: list[Message], call: ToolCall) -> Message:
    """Returns the assistant's message with one more call. If it was the last message, it is removed from the list."""
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        return Message(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call))
    return Message(role="assistant", content="", tool_calls=(call,))


def _read_tool(tool: ResponseTool) -> ToolSpec:
    return as_tool({"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}})


def _make_head(answer: Answers) -> dict[str, JSON]:
    tools: list[JSON] = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": False}
        for tool in answer.ask.tools
    ]  # fmt: skip
    return {
        "id": answer.id, "object": "response", "created_at": answer.created, "model": answer.ask.model, "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {},
        "parallel_tool_calls": not answer.ask.one_call,
        "temperature": None, "top_p": None, "tool_choice": "auto", "tools": tools, "output": [],
    }  # fmt: skip


def _make_items(answer: Answers) -> list[JSON]:
    message = make_shown_message(answer.turns[0], answer.ask)
    calls = calls_of(message)
    items: list[JSON] = [_message_item(answer, message.content)] if message.content or not calls else []
    items += [
        {
            "type": "function_call", "id": f"fc_{_make_number(answer)}{place}", "call_id": call.id, "name": call.name,
            "arguments": json.dumps(call.arguments), "status": "completed",
        }
        for place, call in enumerate(calls)
    ]  # fmt: skip
    return items


def _make_number(answer: Answers) -> str:
    return answer.id.removeprefix("resp_")


def _message_item(answer: Answers, text: str) -> dict[str, JSON]:
    item: dict[str, JSON] = {"type": "message", "id": f"msg_{_make_number(answer)}", "role": "assistant"}
    return {**item, "status": "completed", "content": [_make_part(text)]}


def _make_part(text: str) -> dict[str, JSON]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _ResponseStream(TextStream):
    def __init__(self, head: Answers) -> None:
        super().__init__(head)
        self._numbers = count()

    def end(self, answer: Answers) -> Iterator[Event]:
        yield from self._begin(answer.num_prompt_tokens)
        for place, item in enumerate(_make_items(answer)):
            assert isinstance(item, Mapping)
            at: dict[str, JSON] = {"output_index": place, "item_id": item["id"]}
            if item["type"] == "message":
                yield from self._message_end(item, at)
            else:
                arguments = item["arguments"]
                yield self._make_event("response.output_item.added", output_index=place, item={**item, "arguments": ""})
                yield self._make_event("response.function_call_arguments.delta", **at, delta=arguments)
                yield self._make_event(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=arguments
                )
            yield self._make_event("response.output_item.done", output_index=place, item=item)
        whole = _write_whole(answer)
        yield self._make_event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield self._make_event("error", code=error.code or error.kind, message=str(error), param=error.param or None)

    def _make_event(self, kind: str, **fields: JSON) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _write_head(self, num_prompt_tokens: int) -> Iterator[Event]:
        del num_prompt_tokens
        for kind in ("response.created", "response.in_progress"):
            yield self._make_event(kind, response={**_make_head(self._answer), "status": "in_progress"})

    def _text(self, new: str) -> Iterator[Event]:
        item = _message_item(self._answer, "")
        at: dict[str, JSON] = {"output_index": 0, "item_id": item["id"], "content_index": 0}
        if not self._is_text_open:
            self._is_text_open = True
            added: dict[str, JSON] = {**item, "content": [], "status": "in_progress"}
            yield self._make_event("response.output_item.added", output_index=0, item=added)
            yield self._make_event("response.content_part.added", **at, part=_make_part(""))
        if new:
            yield self._make_event("response.output_text.delta", **at, delta=new, logprobs=[])

    def _message_end(self, item: Mapping[str, JSON], at: dict[str, JSON]) -> Iterator[Event]:
        content = item["content"]
        assert isinstance(content, list) and isinstance(content[0], dict)
        text, at_part = str(content[0]["text"]), {**at, "content_index": 0}
        yield from self._text(self._sent.finish(text))
        yield self._make_event("response.output_text.done", **at_part, text=text, logprobs=[])
        yield self._make_event("response.content_part.done", **at_part, part=content[0])
