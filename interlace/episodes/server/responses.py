"""OpenAI's responses: text and tools."""

import json
from collections.abc import Iterator, Mapping

from interlace.core.messages import Message, ToolCall, ToolSpec, as_tool, read_arguments
from interlace.core.types import JSON
from interlace.episodes.server.ask import (
    Answers,
    Ask,
    Event,
    OpenAIErrors,
    TextCodec,
    cached_tokens,
    finish_of,
    runs_of,
    sampling_of,
    shown,
    text_of,
    unique,
)
from interlace.episodes.server.body import Body
from interlace.episodes.server.errors import ApiError

_TEXT = ("input_text", "output_text", "text")


class Responses(OpenAIErrors):
    """`/v1/responses`. The whole conversation comes with each request: nothing is stored."""

    def read(self, body: Body, codec: TextCodec | None) -> Ask:  # noqa: ARG002 - a chat template writes the tokens
        """Reads a request."""
        body.refuse("previous_response_id", "responses are not stored: send the whole conversation as input")
        body.refuse("conversation", "conversations are not stored: send the whole conversation as input")
        body.refuse("background", "a response is waited for", False)
        instructions = body.text("instructions")
        messages = [Message(role="system", content=instructions)] if instructions else []
        given = body.get("input")
        if isinstance(given, str):
            messages.append(Message(role="user", content=given))
        else:
            messages += _messages(body.objects("input"))
        if not messages:
            raise ApiError(400, "input has no message.", param="input")
        return Ask(
            context=tuple(messages),
            tools=_tools(body),
            model=body.text("model"),
            max_tokens=body.integer("max_output_tokens", least=1),
            sampling=sampling_of(body),
            seed=body.integer("seed", least=-(1 << 63)),
            stream=body.flag("stream"),
            token_ids=body.flag("return_token_ids"),
        )

    def write(self, answer: Answers, codec: TextCodec | None) -> dict[str, JSON]:
        """Writes an answer."""
        del codec
        turn = answer.turns[0]
        is_cut = finish_of(turn) == "length"
        found: dict[str, JSON] = {
            **_head(answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(answer),
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached_tokens(answer), "cache_write_tokens": 0},
                "output_tokens": answer.num_drawn_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + answer.num_drawn_tokens,
            },
        }
        if answer.ask.token_ids:
            found |= {
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "token_ids": turn.token_ids.tolist(),
                "logprobs": turn.logprobs.tolist(),
                "weight_versions": runs_of(turn),
            }
        return found

    def events(self, answer: Answers, codec: TextCodec | None) -> Iterator[Event]:
        """Writes the events of a stream."""
        for number, (kind, fields) in enumerate(_events(answer, self.write(answer, codec))):
            yield kind, {"type": kind, "sequence_number": number, **fields}


def _messages(items: list[Body]) -> list[Message]:
    """Reads the items of an input; calls that follow each other are of one message, as the model wrote them."""
    messages: list[Message] = []
    for place, item in enumerate(items):
        kind, where = item.text("type", "message"), f"input[{place}]"
        if kind == "message":
            role = item.text("role")
            content = text_of(item, "content", where, kinds=_TEXT) or ""
            if role not in ("system", "developer", "user", "assistant"):
                raise item.wrong("role", "system, user or assistant")
            messages.append(Message(role="system" if role == "developer" else role, content=content))
        elif kind == "function_call":
            call = ToolCall(
                id=item.text("call_id"),
                name=item.text("name"),
                arguments=read_arguments(item.text("arguments"), where),
            )
            messages.append(_with_call(messages, call))
        elif kind == "function_call_output":
            output = text_of(item, "output", where, kinds=_TEXT) or ""
            messages.append(Message(role="tool", content=output, tool_call_id=item.text("call_id")))
        elif kind != "reasoning":  # thoughts are not given back to the model
            raise ApiError(400, f"{where} is of type {kind!r}: only text and calls of functions can be read.")
    return messages


def _with_call(messages: list[Message], call: ToolCall) -> Message:
    """Returns the assistant's message with one call more; takes it off the end where it is the last one."""
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        return Message(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call))
    return Message(role="assistant", content="", tool_calls=(call,))


def _tools(body: Body) -> tuple[ToolSpec, ...]:
    body.refuse("tool_choice", "a call cannot be forced; write auto or none", "auto", "none")
    found = []
    for tool in body.objects("tools"):
        if tool.get("type") != "function":
            raise tool.wrong("type", "function: no other tools are there")
        fields: dict[str, JSON] = {name: tool.get(name) for name in ("name", "description", "parameters")}
        found.append(as_tool(fields, "a tool"))
    return () if body.get("tool_choice") == "none" else unique(found)


def _head(answer: Answers) -> dict[str, JSON]:
    tools: list[JSON] = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": False}
        for tool in answer.ask.tools
    ]  # fmt: skip
    return {
        "id": answer.id, "object": "response", "created_at": answer.created, "model": answer.ask.model, "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
        "temperature": None, "top_p": None, "tool_choice": "auto", "tools": tools, "output": [],
    }  # fmt: skip


def _items(answer: Answers) -> list[JSON]:
    message, number = shown(answer.turns[0], answer.ask.stop), answer.id.removeprefix("resp_")
    calls = [call for call in message.tool_calls if not call.error]
    items: list[JSON] = []
    if message.content or not calls:
        part: dict[str, JSON] = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
        )
    items += [
        {
            "type": "function_call", "id": f"fc_{number}{place}", "call_id": call.id, "name": call.name,
            "arguments": json.dumps(call.arguments), "status": "completed",
        }
        for place, call in enumerate(calls)
    ]  # fmt: skip
    return items


def _events(answer: Answers, whole: dict[str, JSON]) -> Iterator[tuple[str, dict[str, JSON]]]:
    begun: dict[str, JSON] = {**_head(answer), "status": "in_progress"}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for place, item in enumerate(_items(answer)):
        assert isinstance(item, Mapping)
        at: dict[str, JSON] = {"output_index": place, "item_id": item["id"]}
        if item["type"] == "message":
            yield from _message_events(item, at)
        else:
            yield "response.output_item.added", {"output_index": place, "item": {**item, "arguments": ""}}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": place, "item": item}
    yield ("response.incomplete" if whole["status"] == "incomplete" else "response.completed"), {"response": whole}


def _message_events(item: Mapping[str, JSON], at: dict[str, JSON]) -> Iterator[tuple[str, dict[str, JSON]]]:
    content = item["content"]
    assert isinstance(content, list)
    part, at_part = content[0], {**at, "content_index": 0}
    added: dict[str, JSON] = {**item, "content": [], "status": "in_progress"}
    yield "response.output_item.added", {"output_index": at["output_index"], "item": added}
    yield "response.content_part.added", {**at_part, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**at_part, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at_part, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at_part, "part": part}
