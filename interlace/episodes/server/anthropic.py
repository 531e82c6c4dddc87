"""Anthropic's messages."""

import json
from collections.abc import Iterator

from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import JSON
from interlace.episodes.base import TurnDraft
from interlace.episodes.server.ask import (
    Answers,
    AnswerStream,
    Ask,
    Event,
    TextCodec,
    cached_tokens,
    details_of,
    finish_of,
    sampling_of,
    shown,
    stops_of,
    text_of,
    unique,
)
from interlace.episodes.server.body import Body
from interlace.episodes.server.errors import ApiError
from interlace.episodes.server.stream import SentText

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
        return {
            **_head(answer),
            "content": _blocks(answer),
            "stop_reason": _reason(answer),
            "stop_sequence": _stopped_by(answer),
            "usage": _usage(answer),
            **details_of(answer),
        }

    def stream(self, head: Answers, codec: TextCodec | None) -> AnswerStream:
        """Begins the events of a stream."""
        del codec
        return _MessageStream(head)

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Writes an error."""
        fields: dict[str, JSON] = {"type": error.kind, "message": str(error)}
        return {"type": "error", "error": fields}


class _MessageStream:
    """Text as it is drawn; a use of a tool whole, when the answer is."""

    def __init__(self, head: Answers) -> None:
        self._answer, self._sent = head, SentText()
        self._has_begun = self._is_text_open = False

    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        """Writes what a draft adds."""
        del place  # there is one answer
        yield from self._begin(len(draft.prompt_ids))
        if new := self._sent.more(draft.read().content, self._answer.ask.stop):
            yield from self._text(new)

    def end(self, answer: Answers) -> Iterator[Event]:
        """Writes what is left."""
        yield from self._begin(answer.num_prompt_tokens)
        for place, block in enumerate(_blocks(answer)):
            assert isinstance(block, dict)
            if block["type"] == "text":
                yield from self._text(self._sent.rest(str(block["text"])))
            else:
                yield _event("content_block_start", index=place, content_block={**block, "input": {}})
                delta: dict[str, JSON] = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=place, delta=delta)
            yield _event("content_block_stop", index=place)
        ended: dict[str, JSON] = {"stop_reason": _reason(answer), "stop_sequence": _stopped_by(answer)}
        yield _event("message_delta", delta=ended, usage=_usage(answer))
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Writes the error, by which clients know that no more comes."""
        yield "error", AnthropicMessages().error(error)

    def _begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        if self._has_begun:
            return
        self._has_begun = True
        usage: dict[str, JSON] = {
            "input_tokens": num_prompt_tokens, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }  # fmt: skip
        head = _head(self._answer)
        yield _event(
            "message_start",
            message={**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage},
        )

    def _text(self, new: str) -> Iterator[Event]:
        if not self._is_text_open:
            self._is_text_open = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if new:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": new})


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
