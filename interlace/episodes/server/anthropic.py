"""Anthropic's messages."""

import json
from collections.abc import Iterator

from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import JSON
from interlace.episodes.server.ask import (
    Answers,
    Ask,
    Event,
    TextCodec,
    cached_tokens,
    finish_of,
    runs_of,
    sampling_of,
    shown,
    stops_of,
    text_of,
    unique,
)
from interlace.episodes.server.body import Body
from interlace.episodes.server.errors import ApiError

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class AnthropicMessages:
    """`/v1/messages`."""

    def read(self, body: Body, codec: TextCodec | None) -> Ask:  # noqa: ARG002 - a chat template writes the tokens
        """Reads a request."""
        system = text_of(body, "system", "system") or ""
        messages = [Message(role="system", content=system)] if system else []
        for place, each in enumerate(body.objects("messages")):
            messages += _messages(each, f"messages[{place}]")
        if not messages:
            raise ApiError(400, "messages has no message.", param="messages")
        return Ask(
            context=tuple(messages),
            tools=_tools(body),
            model=body.text("model"),
            max_tokens=body.integer("max_tokens", least=1),
            stop=stops_of(body, "stop_sequences"),
            sampling=sampling_of(body),
            stream=body.flag("stream"),
            token_ids=body.flag("return_token_ids"),
        )

    def write(self, answer: Answers, codec: TextCodec | None) -> dict[str, JSON]:
        """Writes an answer."""
        del codec
        found: dict[str, JSON] = {
            **_head(answer),
            "content": _blocks(answer),
            "stop_reason": _reason(answer),
            "stop_sequence": _stopped_by(answer),
            "usage": _usage(answer),
        }
        if answer.ask.token_ids:
            turn = answer.turns[0]
            found |= {
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "token_ids": turn.token_ids.tolist(),
                "logprobs": turn.logprobs.tolist(),
                "weight_versions": runs_of(turn),
            }
        return found

    def events(self, answer: Answers, codec: TextCodec | None) -> Iterator[Event]:
        """Writes the events of a stream."""
        del codec
        usage = _usage(answer)
        begun: dict[str, JSON] = {
            **_head(answer), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        }  # fmt: skip
        yield _event("message_start", message=begun)
        for place, block in enumerate(_blocks(answer)):
            assert isinstance(block, dict)
            if block["type"] == "text":
                start: dict[str, JSON] = {"type": "text", "text": ""}
                delta: dict[str, JSON] = {"type": "text_delta", "text": block["text"]}
            else:
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_start", index=place, content_block=start)
            yield _event("content_block_delta", index=place, delta=delta)
            yield _event("content_block_stop", index=place)
        ended: dict[str, JSON] = {"stop_reason": _reason(answer), "stop_sequence": _stopped_by(answer)}
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Writes an error."""
        fields: dict[str, JSON] = {"type": error.kind, "message": str(error)}
        return {"type": "error", "error": fields}


def _event(kind: str, **fields: JSON) -> Event:
    return kind, {"type": kind, **fields}


def _messages(value: Body, where: str) -> list[Message]:
    """Reads one message: its results of tools come first, each as a message of its own."""
    role = value.text("role")
    if role not in ("user", "assistant"):
        raise value.wrong("role", "user or assistant")
    content = value.get("content")
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    results, texts, calls = [], [], []
    for block in value.objects("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise block.wrong("input", "an object")
            calls.append(ToolCall(id=block.text("id"), name=block.text("name"), arguments=arguments))
        elif kind == "tool_result":
            said = text_of(block, "content", where) or ""
            results.append(Message(role="tool", content=said, tool_call_id=block.text("tool_use_id")))
        elif kind not in ("thinking", "redacted_thinking"):  # thoughts are not given back to the model
            raise ApiError(400, f"{where} has a block of type {kind!r}: only text and tools can be read.")
    if texts or calls or not results:
        results.append(Message(role=role, content="".join(texts), tool_calls=tuple(calls)))
    return results


def _tools(body: Body) -> tuple[ToolSpec, ...]:
    choice = body.inner("tool_choice").text("type", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, f"tool_choice.type = {choice!r}: a call cannot be forced; write auto or none.")
    if choice == "none":
        return ()
    found = []
    for tool in body.objects("tools"):
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise tool.wrong("input_schema", "a JSON schema")
        found.append(ToolSpec(name=tool.text("name"), description=tool.text("description"), parameters=schema))
    return unique(found)


def _head(answer: Answers) -> dict[str, JSON]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.ask.model}


def _blocks(answer: Answers) -> list[JSON]:
    message = shown(answer.turns[0], answer.ask.stop)
    calls = [call for call in message.tool_calls if not call.error]
    found: list[JSON] = []
    if message.content or not calls:
        found.append({"type": "text", "text": message.content})
    found += [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in calls]
    return found


def _stopped_by(answer: Answers) -> str | None:
    content = answer.turns[0].message.content
    return next((stop for stop in answer.ask.stop if stop in content), None)


def _reason(answer: Answers) -> str:
    return "stop_sequence" if _stopped_by(answer) else _REASONS[finish_of(answer.turns[0])]


def _usage(answer: Answers) -> dict[str, JSON]:
    cached = cached_tokens(answer)
    return {
        "input_tokens": answer.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.num_drawn_tokens,
    }
