"""OpenAI's chat completions."""

import json
from collections.abc import Iterator
from dataclasses import replace

from interlace.core.messages import Message
from interlace.core.types import JSON
from interlace.episodes.base import Context, Turn
from interlace.episodes.server.ask import (
    Answers,
    Ask,
    Event,
    OpenAIErrors,
    TextCodec,
    finish_of,
    logprobs_of,
    message_of,
    runs_of,
    sampling_of,
    shown,
    stops_of,
    tools_of,
    usage_of,
)
from interlace.episodes.server.body import Body
from interlace.episodes.server.errors import ApiError


class Chat(OpenAIErrors):
    """`/v1/chat/completions`."""

    def read(self, body: Body, codec: TextCodec | None) -> Ask:  # noqa: ARG002 - a chat template writes the tokens
        """Reads a request."""
        messages = tuple(message_of(each, f"messages[{place}]") for place, each in enumerate(body.objects("messages")))
        if not messages:
            raise ApiError(400, "messages has no message.", param="messages")
        body.refuse("response_format", "the form of an answer cannot be forced", {"type": "text"})
        body.refuse("top_logprobs", "only the log-probs of the drawn tokens are known", 0)
        return replace(completion_ask(body, messages), tools=tools_of(body), logprobs=body.flag("logprobs"))

    def write(self, answer: Answers, codec: TextCodec | None) -> dict[str, JSON]:
        """Writes an answer."""
        choices: list[JSON] = []
        for place, turn in enumerate(answer.turns):
            message = shown(turn, answer.ask.stop)
            logprobs = logprobs_of(turn, codec) if answer.ask.logprobs else None
            choices.append(
                {
                    "index": place,
                    "message": chat_message(message),
                    "finish_reason": finish_of(turn),
                    "logprobs": logprobs,
                    **extras_of(answer, turn),
                }
            )
        return {**_head(answer, "chat.completion"), "choices": choices, "usage": usage_of(answer), **prompt_of(answer)}

    def events(self, answer: Answers, codec: TextCodec | None) -> Iterator[Event]:
        """Writes the chunks of a stream."""
        head = _head(answer, "chat.completion.chunk")
        for place, turn in enumerate(answer.turns):
            first: dict[str, JSON] = {"role": "assistant", "content": ""}
            yield "", {**head, "choices": [_chunk(place, first)], **(prompt_of(answer) if not place else {})}
            for delta in _deltas(shown(turn, answer.ask.stop)):
                yield "", {**head, "choices": [_chunk(place, delta)]}
            last: dict[str, JSON] = {**_chunk(place, {}), "finish_reason": finish_of(turn), **extras_of(answer, turn)}
            last["logprobs"] = logprobs_of(turn, codec) if answer.ask.logprobs else None
            yield "", {**head, "choices": [last]}
        if answer.ask.include_usage:
            yield "", {**head, "choices": [], "usage": usage_of(answer)}
        yield "", "[DONE]"


def completion_ask(body: Body, context: Context) -> Ask:
    """Reads the fields that chat and text completions share, and makes a request of them."""
    length = body.integer("max_completion_tokens", least=1) or body.integer("max_tokens", least=1)
    return Ask(
        context=context,
        model=body.text("model"),
        max_tokens=length,
        stop=stops_of(body),
        sampling=sampling_of(body),
        num_answers=body.integer("n", least=1) or 1,
        seed=body.integer("seed", least=-(1 << 63)),
        stream=body.flag("stream"),
        include_usage=body.inner("stream_options").flag("include_usage"),
        token_ids=body.flag("return_token_ids"),
    )


def prompt_of(answer: Answers) -> dict[str, JSON]:
    """Returns the context's token ids, where they were asked for."""
    return {"prompt_token_ids": answer.turns[0].prompt_ids.tolist()} if answer.ask.token_ids else {}


def extras_of(answer: Answers, turn: Turn) -> dict[str, JSON]:
    """Returns an answer's token ids and versions, where they were asked for."""
    if not answer.ask.token_ids:
        return {}
    return {"token_ids": turn.token_ids.tolist(), "weight_versions": runs_of(turn)}


def chat_message(message: Message) -> dict[str, JSON]:
    """Writes an answer's message."""
    calls = _calls(message)
    found: dict[str, JSON] = {
        "role": "assistant",
        "content": message.content or (None if calls else ""),
        "refusal": None,
    }
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _calls(message: Message) -> list[JSON]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
        if not call.error
    ]


def _deltas(message: Message) -> Iterator[dict[str, JSON]]:
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    for place, call in enumerate(_calls(message)):
        assert isinstance(call, dict)
        yield {"tool_calls": [{"index": place, **call}]}


def _head(answer: Answers, kind: str) -> dict[str, JSON]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.ask.model}


def _chunk(place: int, delta: dict[str, JSON]) -> dict[str, JSON]:
    return {"index": place, "delta": delta, "finish_reason": None, "logprobs": None}


class Completions(OpenAIErrors):
    """`/v1/completions`: a prompt of text or token ids, without a chat template."""

    def read(self, body: Body, codec: TextCodec | None) -> Ask:
        """Reads a request."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if codec is None:
                raise ApiError(
                    400, "a prompt of text cannot be read here: give token ids, or messages.", param="prompt"
                )
            context = codec.encode(prompt)
        else:
            context = Body({"prompt": prompt}).token_ids("prompt")
        body.refuse("echo", "the prompt is not repeated", False)
        body.refuse("suffix", "nothing can be put behind an answer", "")
        return replace(completion_ask(body, context), logprobs=body.integer("logprobs") is not None)

    def write(self, answer: Answers, codec: TextCodec | None) -> dict[str, JSON]:
        """Writes an answer."""
        choices = [self._choice(answer, place, turn, codec) for place, turn in enumerate(answer.turns)]
        found = {**_head(answer, "text_completion"), "choices": choices, "usage": usage_of(answer)}
        return {**found, **prompt_of(answer)}

    def events(self, answer: Answers, codec: TextCodec | None) -> Iterator[Event]:
        """Writes the chunks of a stream."""
        head = _head(answer, "text_completion")
        for place, turn in enumerate(answer.turns):
            yield "", {**head, "choices": [self._choice(answer, place, turn, codec)]}
        if answer.ask.include_usage:
            yield "", {**head, "choices": [], "usage": usage_of(answer)}
        yield "", "[DONE]"

    def _choice(self, answer: Answers, place: int, turn: Turn, codec: TextCodec | None) -> dict[str, JSON]:
        content = shown(replace(turn, message=Message(role="assistant", content=turn.text)), answer.ask.stop).content
        found: dict[str, JSON] = {"index": place, "text": content, "logprobs": None, **extras_of(answer, turn)}
        if answer.ask.logprobs:
            names = [logprob["token"] for logprob in logprobs_of(turn, codec)["content"]]  # type: ignore[index,union-attr,call-overload]
            found["logprobs"] = {"tokens": names, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None}
        found["finish_reason"] = "length" if finish_of(turn) == "length" else "stop"
        return found


class TokenGeneration(OpenAIErrors):
    """`/inference/v1/generate`: token ids in, token ids out, with vLLM's names."""

    def read(self, body: Body, codec: TextCodec | None) -> Ask:  # noqa: ARG002 - its prompt is tokens
        """Reads a request."""
        sampling = body.inner("sampling_params")
        ask = completion_ask(sampling, body.token_ids("token_ids"))
        model, stream = body.text("model"), body.flag("stream")
        wanted = sampling_of(sampling)
        if stops := sampling.items("stop_token_ids"):
            wanted["stop_token_ids"] = list(stops)
        return replace(ask, model=model, stream=stream, logprobs=True, token_ids=True, sampling=wanted)

    def write(self, answer: Answers, codec: TextCodec | None) -> dict[str, JSON]:
        """Writes an answer."""
        del codec  # tokens are named by their ids
        choices: list[JSON] = [
            {
                "index": place,
                "finish_reason": "length" if finish_of(turn) == "length" else "stop",
                "logprobs": logprobs_of(turn, None),
                **extras_of(answer, turn),
            }
            for place, turn in enumerate(answer.turns)
        ]
        return {"request_id": answer.id, "choices": choices, "usage": usage_of(answer), "prompt_logprobs": None}

    def events(self, answer: Answers, codec: TextCodec | None) -> Iterator[Event]:
        """Writes the chunks of a stream: one."""
        yield "", self.write(answer, codec)
        yield "", "[DONE]"
