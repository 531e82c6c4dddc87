"""Ends and log-probs of answers have the values that clients of other servers expect."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from interlace.core.errors import ContextFullError
from interlace.core.messages import Message
from interlace.core.types import FinishReason
from interlace.models.tiny import build_tokenizer
from interlace.rollouts.base import Context, Tools, Turn
from interlace.run.serve import TokenizerCodec
from tests.support.scripted_session import ScriptedSession
from tests.unit.agents.server.test_server import ASK, CALL, HELLO, Client, served


class Changed(ScriptedSession):
    """A scripted session whose turns have other values than their messages."""

    changes: ClassVar[Mapping[str, object]] = {}

    async def generate(self, *context: object, **options: object) -> Turn:
        turn = await super().generate(*context, **options)  # type: ignore[arg-type]
        return replace(turn, **self.changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_was_cut_has_the_reason_length_although_it_contains_a_call(is_stream: bool) -> None:
    """Further calls may be missing, which `tool_calls` would hide from the client."""
    session = ScriptedSession([CALL] * 4, finish_reason=FinishReason.LENGTH)

    async def ask(client: Client, path: str, body: dict[str, object]) -> list[dict]:
        if not is_stream:
            return [await client.post(path, body)]
        return [data for _, data in await client.events(path, {**body, "stream": True}) if isinstance(data, dict)]

    async def use(client: Client) -> None:
        choices = [choice for each in await ask(client, "/v1/chat/completions", ASK) for choice in each["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        assert any((choice.get("message") or choice["delta"]).get("tool_calls") for choice in choices)
        found = await ask(client, "/v1/completions", {"prompt": [5]})
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        found = await ask(client, "/inference/v1/generate", {"token_ids": [5]})
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        found = await ask(client, "/v1/messages", {**ASK, "max_tokens": 9})
        reasons = [each["delta"]["stop_reason"] for each in found if each["type"] == "message_delta"]
        assert (reasons or [found[0]["stop_reason"]]) == ["max_tokens"]

    served(session, use)


def test_a_stop_text_of_white_space_is_named_as_the_reason() -> None:
    class Stopped(Changed):
        changes: ClassVar[Mapping[str, object]] = {"text": "one\n\n"}

    async def use(client: Client) -> None:
        found = await client.post("/v1/messages", {**ASK, "max_tokens": 9, "stop_sequences": ["\n\n"]})
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "\n\n")
        assert found["content"] == [{"type": "text", "text": "one"}]

    served(Stopped([Message(role="assistant", content="one")]), use)


def test_a_part_of_a_character_has_its_own_bytes_among_the_log_probs() -> None:
    """Each had the bytes of the character that replaces it."""
    tokenizer = build_tokenizer(256, chat=True)
    codec, text = TokenizerCodec(tokenizer), " 🙂<answer>é"
    spelled = [codec.spell(token) for token in codec.encode(text)]
    assert b"".join(spelled).decode() == text and b"\xf0" in spelled and b"<answer>" in spelled
    ids = np.array(codec.encode(text), np.int32)

    class Emoji(Changed):
        changes: ClassVar[Mapping[str, object]] = {"token_ids": ids, "logprobs": -np.ones(len(ids), np.float32)}

    async def use(client: Client) -> None:
        [choice] = (await client.post("/v1/chat/completions", {**ASK, "logprobs": True}))["choices"]
        found = choice["logprobs"]["content"]
        assert bytes(byte for each in found for byte in each["bytes"]).decode() == text

    served(Emoji([HELLO]), use, codec=codec)


def test_a_context_without_room_has_the_code_that_clients_know() -> None:
    class Full(ScriptedSession):
        async def generate(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise ContextFullError("the context has 9 tokens.")

    async def use(client: Client) -> None:
        error = (await client.post("/v1/chat/completions", ASK))["error"]
        assert client.status == 400 and error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]

    served(Full([]), use)


def test_a_count_of_tokens_reads_earlier_answers_as_the_model_wrote_them() -> None:
    """An answer that ends before a stop text was counted in the form of its client, not of the next request."""
    counted: list[list[object]] = []

    class Counting(ScriptedSession):
        async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
            counted.append(list(context))
            return 1

    async def use(client: Client) -> None:
        first = await client.post("/v1/messages", {**ASK, "max_tokens": 9, "stop_sequences": ["lo"]})
        said = [*ASK["messages"], {"role": "assistant", "content": first["content"]}, ASK["messages"][0]]
        await client.post("/v1/messages/count_tokens", {"messages": said})
        await client.post("/v1/messages", {"messages": said, "max_tokens": 9})

    session = Counting([HELLO, HELLO])
    served(session, use)
    assert counted[0] == session.asked[1][0] and counted[0][1] == HELLO


def test_half_a_character_in_the_arguments_of_a_call_is_refused() -> None:
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}

    async def use(client: Client) -> None:
        found = await client.post("/v1/chat/completions", {**ASK, "messages": [*ASK["messages"], said]})
        assert client.status == 400 and "messages[1] has a tool call" in found["error"]["message"]

    served(ScriptedSession([HELLO]), use)


def test_an_answer_that_is_refused_withdraws_the_others() -> None:
    """The client gets no answer, so none may be trained."""
    session = ScriptedSession([HELLO])

    async def use(client: Client) -> None:
        error = (await client.post("/v1/chat/completions", {**ASK, "n": 2}))["error"]
        assert "max_turns" in error["message"] and len(session.asked) == 2
        assert not session.turns

    served(session, use)
