"""Routes of OpenAI's chat and text completions, and of vLLM's token generation."""

import json
from collections.abc import Iterator
from dataclasses import replace

from interlace.agents.server.ask import (
    Answers,
    Ask,
    TextCodec,
    calls_of,
    check_tools,
    finish_of,
    logprobs_of,
    make_shown_message,
    prompt_of,
    token_name,
    tokens_of,
    usage_of,
)
from interlace.agents.server.body import ApiError, Body
from interlace.agents.server.dialect import AnswerStream, Dialect, Event, SentText, raise_sampled_again
from interlace.agents.server.requests import MOST_CHOICES, ChatRequest, CompletionRequest, GenerateRequest, Ids
from interlace.core.messages import Message
from interlace.core.types import JSON, IntArray
from interlace.rollouts.base import Turn, TurnDraft


class Chat(Dialect):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def read(self, body: Body) -> Ask:
        request = body.read(ChatRequest)
        messages = tuple(one.message(f"messages[{place}]") for place, one in enumerate(request.messages))
        ask = request.begin_ask(messages)
        return replace(
            ask,
            tools=check_tools(request.list_tools()),
            max_tokens=request.max_completion_tokens or ask.max_tokens,
            logprobs=bool(request.logprobs),
            one_call=request.parallel_tool_calls is False,
            chat_template_kwargs=request.chat_template_kwargs or {},
        )

    def write(self, answer: Answers) -> dict[str, JSON]:
        choices: list[JSON] = []
        for place, turn in enumerate(answer.turns):
            message = make_shown_message(turn, answer.ask)
            logprobs = logprobs_of(turn, self._codec) if answer.ask.logprobs else None
            choices.append(
                {
                    "index": place,
                    "message": _chat_message(message),
                    "finish_reason": finish_of(turn, answer.ask),
                    "logprobs": logprobs,
                    **tokens_of(answer, turn),
                }
            )
        found: dict[str, JSON] = {**_head(answer, "chat.completion"), "choices": choices, "usage": usage_of(answer)}
        return {**found, **prompt_of(answer, answer.turns[0].prompt_ids)}

    def stream(self, head: Answers) -> AnswerStream:
        return _ChatStream(head, self._codec)


class _Chunks(AnswerStream):
    kind = ""

    def __init__(self, head: Answers, codec: TextCodec | None) -> None:
        super().__init__(head, codec)
        self._head = _head(head, self.kind)
        self._sent: dict[int, SentText] = {}
        """Sent text of each answer, by its index."""

    def _make_chunk(self, choice: dict[str, JSON], **more: JSON) -> Event:
        return "", {**self._head, "choices": [choice], **more}

    def _send_end(self, answer: Answers) -> Iterator[Event]:
        if answer.ask.include_usage:
            yield "", {**self._head, "choices": [], "usage": usage_of(answer)}
        yield "", "[DONE]"


class _ChatStream(_Chunks):
    """Sends content and reasoning while they are sampled, and calls, log-probs and token ids at the end."""

    kind = "chat.completion.chunk"

    def __init__(self, head: Answers, codec: TextCodec | None) -> None:
        super().__init__(head, codec)
        self._thought: dict[int, SentText] = {}

    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        found = draft.read()
        yield from self._begin(place, draft.prompt_ids)
        yield from self._texts(
            place, self._thought[place].more(found.reasoning or ""),
            self._sent[place].more(found.content, self._answer.ask.stop),
        )  # fmt: skip

    def end(self, answer: Answers) -> Iterator[Event]:
        for place, turn in enumerate(answer.turns):
            found = make_shown_message(turn, answer.ask)
            yield from self._begin(place, turn.prompt_ids)
            thought = self._thought[place].finish(found.reasoning or "")
            yield from self._texts(place, thought, self._sent[place].finish(found.content))
            for number, call in enumerate(_format_calls(found)):
                assert isinstance(call, dict)
                yield self._make_chunk(_make_choice(place, {"tool_calls": [{"index": number, **call}]}))
            last: dict[str, JSON] = {
                **_make_choice(place, {}),
                "finish_reason": finish_of(turn, answer.ask),
                **tokens_of(answer, turn),
            }
            last["logprobs"] = logprobs_of(turn, self._codec) if answer.ask.logprobs else None
            yield self._make_chunk(last)
        yield from self._send_end(answer)

    def _begin(self, place: int, prompt_ids: IntArray) -> Iterator[Event]:
        if place not in self._sent:
            about = {} if self._sent else prompt_of(self._answer, prompt_ids)
            self._sent[place], self._thought[place] = SentText(), SentText()
            yield self._make_chunk(_make_choice(place, {"role": "assistant", "content": ""}), **about)

    def _texts(self, place: int, thought: str, content: str) -> Iterator[Event]:
        if thought:
            yield self._make_chunk(_make_choice(place, {"reasoning_content": thought}))
        if content:
            yield self._make_chunk(_make_choice(place, {"content": content}))


def _chat_message(message: Message) -> dict[str, JSON]:
    calls = _format_calls(message)
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


def _format_calls(message: Message) -> list[JSON]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls_of(message)
    ]


def _head(answer: Answers, kind: str) -> dict[str, JSON]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.ask.model}


def _make_choice(place: int, delta: dict[str, JSON]) -> dict[str, JSON]:
    return {"index": place, "delta": delta, "finish_reason": None, "logprobs": None}


class Completions(Dialect):
    """`/v1/completions`: prompts of text or token ids, without a chat template. Choices are in the order of prompts."""

    prefix = "cmpl-"

    def read(self, body: Body) -> Ask:
        request = body.read(CompletionRequest)
        given = request.prompt
        prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        if len(prompts) * (request.n or 1) > MOST_CHOICES:
            text = f"{len(prompts)} prompts with n = {request.n or 1}: a request has at most {MOST_CHOICES} answers."
            raise ApiError(400, text, param="prompt")
        first, *others = [self._encode(prompt) for prompt in prompts]
        ask = request.begin_ask(first)
        return replace(ask, other_contexts=tuple(others), logprobs=request.logprobs is not None)

    def _encode(self, prompt: JSON) -> list[int]:
        if not isinstance(prompt, str):
            return Body({"prompt": prompt}).read(Ids).prompt
        if self._codec is None:
            raise ApiError(400, "a prompt of text cannot be read here: give token ids, or messages.", param="prompt")
        found = self._codec.encode(prompt)
        if not found:
            raise ApiError(400, f"prompt = {prompt!r}: it has no tokens. Give at least one.", param="prompt")
        return found

    def write(self, answer: Answers) -> dict[str, JSON]:
        choices: list[JSON] = [
            {"index": place, "text": _text_of(answer, turn), **_completion_end(answer, turn, self._codec)}
            for place, turn in enumerate(answer.turns)
        ]
        found: dict[str, JSON] = {**_head(answer, "text_completion"), "choices": choices, "usage": usage_of(answer)}
        return found if answer.ask.other_contexts else {**found, **prompt_of(answer, answer.turns[0].prompt_ids)}

    def stream(self, head: Answers) -> AnswerStream:
        return _CompletionStream(head, self._codec)


class _CompletionStream(_Chunks):
    """Sends text while it is sampled, and log-probs and token ids at the end."""

    kind = "text_completion"

    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        new = self._sent.setdefault(place, SentText()).more(draft.text, self._answer.ask.stop)
        if new:
            yield self._make_chunk({"index": place, "text": new, "logprobs": None, "finish_reason": None})

    def end(self, answer: Answers) -> Iterator[Event]:
        for place, turn in enumerate(answer.turns):
            about = {} if place or answer.ask.other_contexts else prompt_of(answer, turn.prompt_ids)
            rest = self._sent.setdefault(place, SentText()).finish(_text_of(answer, turn))
            yield self._make_chunk(
                {"index": place, "text": rest, **_completion_end(answer, turn, self._codec)}, **about
            )
        yield from self._send_end(answer)


def _text_of(answer: Answers, turn: Turn) -> str:
    return make_shown_message(replace(turn, message=Message(role="assistant", content=turn.text)), answer.ask).content


def _completion_end(answer: Answers, turn: Turn, codec: TextCodec | None) -> dict[str, JSON]:
    found: dict[str, JSON] = {"logprobs": None, **tokens_of(answer, turn)}
    if answer.ask.other_contexts:  # the prompts differ, so each choice has its own
        found |= prompt_of(answer, turn.prompt_ids)
    if answer.ask.logprobs:
        names: list[JSON] = [token_name(token, codec) for token in turn.token_ids.tolist()]
        found["logprobs"] = {"tokens": names, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None}
    return {**found, "finish_reason": "length" if finish_of(turn, answer.ask) == "length" else "stop"}


class TokenGeneration(Dialect):
    """`/inference/v1/generate`: token ids in, token ids out, with vLLM's names."""

    prefix = "gen-"

    def read(self, body: Body) -> Ask:
        request = body.read(GenerateRequest)
        ask = request.sampling_params.begin_ask(request.token_ids)
        return replace(ask, model=request.model or "", stream=bool(request.stream), logprobs=True, token_ids=True)

    def write(self, answer: Answers) -> dict[str, JSON]:
        choices = [self.choice(answer, place) for place in range(len(answer.turns))]
        return {"request_id": answer.id, "choices": choices, "usage": usage_of(answer), "prompt_logprobs": None}

    @staticmethod
    def choice(answer: Answers, place: int, first: int = 0) -> dict[str, JSON]:
        """Returns one of the answers as a JSON object. first: index of the first token to write."""
        turn = answer.turns[place]
        return {
            "index": place,
            "finish_reason": "length" if finish_of(turn, answer.ask) == "length" else "stop",
            "logprobs": logprobs_of(turn, None),
            **tokens_of(answer, turn),
            "token_ids": turn.token_ids[first:].tolist(),
        }

    def stream(self, head: Answers) -> AnswerStream:
        return _TokenStream(head, self._codec)


class _TokenStream(_Chunks):
    """Sends token ids while they are sampled, and log-probs and versions at the end."""

    def __init__(self, head: Answers, codec: TextCodec | None) -> None:
        super().__init__(head, codec)
        self._sent_ids: dict[int, list[int]] = {}
        """Sent tokens of each answer, by its index."""

    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        sent = self._sent_ids.setdefault(place, [])
        new = [int(token) for token in draft.token_ids[len(sent) :]]
        sent += new
        choice: dict[str, JSON] = {"index": place, "token_ids": [*new], "finish_reason": None}
        yield "", {"request_id": self._answer.id, "choices": [choice]}

    def end(self, answer: Answers) -> Iterator[Event]:
        for place, sent in self._sent_ids.items():
            if answer.turns[place].token_ids[: len(sent)].tolist() != sent:
                raise_sampled_again()
        places = range(len(answer.turns))
        choices = [TokenGeneration.choice(answer, place, len(self._sent_ids.get(place, ()))) for place in places]
        yield "", {"request_id": answer.id, "choices": choices, "usage": usage_of(answer), "prompt_logprobs": None}
        yield "", "[DONE]"
