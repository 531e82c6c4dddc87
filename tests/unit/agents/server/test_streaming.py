"""Streamed text is sent during generation, equals the complete answer, and does not change the recording."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest

from interlace.agents.server.anthropic import AnthropicMessages
from interlace.agents.server.ask import Answers, Ask
from interlace.agents.server.body import ApiError
from interlace.agents.server.chat import Chat, Completions, TokenGeneration
from interlace.agents.server.dialect import Dialect, SentText
from interlace.agents.server.responses import Responses
from interlace.core.progress import Draft
from interlace.core.types import JSON, NO_GROUP, FinishReason, Request, Response, Sample, SampleKey, SamplingParams
from interlace.models.tiny import build_tiny
from interlace.rollouts.base import TurnDraft
from interlace.rollouts.config import create_kind, parse_episode
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import create_renderer
from interlace.rollouts.rendering.text import TokenText
from interlace.rollouts.session import SessionLimits, pass_draft, read_turn
from tests.support.chat_templates import tokenizer_of
from tests.support.episode_runs import OneEngine, samples_of

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp")
SAID = [{"role": "user", "content": "What is 1+1?"}]
HEARD: dict[str, list[str]] = {}
"""By the way in which it was asked: the pieces of one answer."""
Asker = Callable[["openai.OpenAI", bool], Iterator[str]]


def chat(client: "openai.OpenAI", stream: bool) -> Iterator[str]:
    found = client.chat.completions.create(model="any", messages=SAID, stream=stream)
    if not stream:
        yield found.choices[0].message.content
        return
    for chunk in found:
        yield chunk.choices[0].delta.content or ""


def completions(client: "openai.OpenAI", stream: bool) -> Iterator[str]:
    found = client.completions.create(model="any", prompt=[5, 6, 7], stream=stream)
    for chunk in found if stream else [found]:
        yield chunk.choices[0].text


def responses(client: "openai.OpenAI", stream: bool) -> Iterator[str]:
    found = client.responses.create(model="any", input="What is 1+1?", stream=stream)
    if not stream:
        yield found.output_text
        return
    for number, event in enumerate(found):
        assert event.sequence_number == number
        if event.type == "response.output_text.delta":
            yield event.delta
    assert event.type == "response.incomplete" and event.response.output_text


def messages(client: "openai.OpenAI", stream: bool) -> Iterator[str]:
    body = json.dumps({"model": "any", "messages": SAID, "max_tokens": 400, "stream": stream}).encode()
    request = urllib.request.Request(f"{client.base_url}messages", data=body, headers={"x-api-key": client.api_key})
    with urllib.request.urlopen(request) as found:
        if not stream:
            yield json.load(found)["content"][0]["text"]
            return
        for line in found:
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
            if event.get("type") == "content_block_delta":
                yield event["delta"]["text"]


ASKERS: Mapping[str, Asker] = {each.__name__: each for each in (chat, completions, responses, messages)}


def asks(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    """A program that asks in the way that its row's text names."""
    how, streams = str(row["how"]), bool(row["streams"])
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    pieces = list(ASKERS[how](client, streams))
    if row["index"] == 0:
        HEARD[f"{how} {'in pieces' if streams else 'whole'}"] = pieces
    return 1.0


def hangs_up(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    with client.completions.create(model="any", prompt=[5, 6, 7], stream=True) as stream:
        next(stream)
    return float(len(client.completions.create(model="any", prompt=[5, 6, 7], max_tokens=4).choices))


@cache
def limits() -> SessionLimits:
    _, tokenizer = build_tiny("micro-chat", seed=0)
    return SessionLimits(renderer=create_renderer(tokenizer, RendererConfig()))


def run(function: str, **columns: JSON) -> list[Sample]:
    kind = create_kind(parse_episode({"name": "program", "function": f"{__name__}:{function}"}))
    failures: dict[SampleKey, str] = {}
    tags = build_tiny("micro-chat", seed=0)[1].added_tokens_decoder
    params = SamplingParams(max_new_tokens=400, logit_bias=tuple((tag, -100.0) for tag in tags))
    engine = OneEngine(model="micro-chat", params=params, limits=limits())
    samples = samples_of(kind.create(), failures, 1, engine=engine, columns=columns)
    assert not failures
    return samples


@pytest.mark.parametrize("how", ASKERS)
def test_pieces_come_while_an_answer_is_drawn_and_join_to_it_and_the_recording_is_the_same(how: str) -> None:
    whole, pieces = run("asks", how=how, streams=False), run("asks", how=how, streams=True)
    heard = [piece for piece in HEARD[f"{how} in pieces"] if piece]
    assert len(heard) > 2 and ["".join(heard)] == HEARD[f"{how} whole"]
    for one, other in zip(whole, pieces, strict=True):
        assert [segment.token_ids.tolist() for segment in one.segments] == [
            segment.token_ids.tolist() for segment in other.segments
        ]
        assert [segment.logprobs.tolist() for segment in one.segments] == [
            segment.logprobs.tolist() for segment in other.segments
        ]


def test_what_may_still_change_is_held_back() -> None:
    sent = SentText()
    pieces = [
        sent.more(text, ("END", "\n\n"))
        for text in ("a \ufffd", "a é", "a é\n", "a é\nb E", "a é\nb ENE", "a é\nb ENEND")
    ]
    assert pieces == ["a ", "é", "", "\nb ", "EN", ""] and sent.rest("a é\nb EN") == ""
    assert sent.rest("a é\nb EN, the rest") == ", the rest"


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ("a call in letters", 'So <tool_call>{"name": "now"}</tool_call>'),
        ("a call that cannot be read", "So <tool_call>{now"),
        ("a thought", "<think>hm</think>So it is, is it?"),
    ],
)
def test_a_call_is_never_sent_as_text(how: str, answer: str) -> None:
    renderer = create_renderer(tokenizer_of("qwen3"), RendererConfig())
    ids = renderer._text.encode(answer)
    drafts = [renderer.begun(ids[:size]) for size in range(len(ids))]
    assert "So".startswith(drafts[-1].content) or how == "a thought"
    assert all(renderer.parse(ids).content.startswith(draft.content) for draft in drafts)
    assert max(len(draft.content) for draft in drafts) >= 2


def test_calls_that_cannot_be_read_are_the_same_text_in_pieces_and_whole() -> None:
    """The reasoning was repeated in the content, the stop text stayed, and the stream ended before the calls."""
    renderer = create_renderer(tokenizer_of("qwen3"), RendererConfig())
    ids = renderer._text.encode("<think>hm</think>So <tool_call>{now STOP")
    asked = Request(uid="", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=SamplingParams())
    response = Response(
        request=asked, token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids),
        finish_reason=FinishReason.STOP, text=renderer._text.decode(ids),
    )  # fmt: skip
    head = Answers(id="chatcmpl-1", created=0, ask=Ask(context=(), stop=("STOP",), stream=True))
    answer, stream = replace(head, turns=[read_turn(0, response, renderer, ())]), Chat(None).stream(head)
    drafts: list[TurnDraft] = []
    for size in range(1, len(ids)):
        pass_draft(asked, renderer, (), drafts.append, Draft(request_id="", token_ids=ids[:size], text=""))
    events = [event for draft in drafts for event in stream.more(0, draft)] + [*stream.end(answer)]
    deltas = [chunk["choices"][0]["delta"] for _, chunk in events if isinstance(chunk, dict)]
    joined = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content")}
    message = Chat(None).write(answer)["choices"][0]["message"]
    assert joined == {name: message[name] for name in joined}
    assert joined == {"content": "So <tool_call>{now ", "reasoning_content": "hm"}


def test_the_tokens_of_a_turn_without_calls_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, num_decoded = create_renderer(tokenizer_of("qwen3"), RendererConfig()), []
    decode = TokenText.decode
    monkeypatch.setattr(TokenText, "decode", lambda *given: num_decoded.append(len(given[1])) or decode(*given))
    ids = renderer._text.encode("It is 5.")
    asked = Request(uid="", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=SamplingParams())
    response = Response(
        request=asked, token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip
    assert read_turn(0, response, renderer, ()).answer == "It is 5."
    assert num_decoded == [len(ids)]


def test_an_answer_that_begins_again_is_sent_once_or_ends_with_an_error() -> None:
    """After the loss of an engine, tokens were sent twice, and text was cut without an error."""
    head = Answers(id="gen-1", created=0, ask=Ask(context=(), stream=True))
    asked = Request(uid="", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=SamplingParams())
    response = Response(
        request=asked, token_ids=[5, 6, 7], logprobs=[-1.0] * 3, versions=[0] * 3, finish_reason=FinishReason.STOP,
        text="567",
    )  # fmt: skip
    answer = replace(head, turns=[read_turn(0, response, None, ())])

    def send(dialect: Dialect, drafts: list[list[int]]) -> list[dict]:
        stream, found = dialect.stream(head), list[TurnDraft]()
        for ids in drafts:
            draft = Draft(request_id="", token_ids=ids, text="".join(map(str, ids)))
            pass_draft(asked, None, (), found.append, draft)
        events = [event for draft in found for event in stream.more(0, draft)] + [*stream.end(answer)]
        return [chunk["choices"][0] for _, chunk in events if isinstance(chunk, dict)]

    again = [[5, 6], [5], [5, 6, 7]]
    assert [token for choice in send(TokenGeneration(None), again) for token in choice["token_ids"]] == [5, 6, 7]
    assert "".join(choice["text"] for choice in send(Completions(None), again)) == "567"
    for kind in (TokenGeneration, Completions, Chat, Responses, AnthropicMessages):
        with pytest.raises(ApiError, match="the new answer does not continue the sent one"):
            send(kind(None), [[5, 9], [5]])


def test_a_client_that_hangs_up_in_the_middle_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    cancel = EngineDriver.cancel

    def noted(self: EngineDriver, request_id: str) -> None:
        ended.append(request_id)
        cancel(self, request_id)

    monkeypatch.setattr(EngineDriver, "cancel", noted)
    samples = run("hangs_up")
    assert len(ended) == len(samples) == 2
    for sample in samples:
        drawn = [segment for segment in sample.segments if segment.sampled is None]
        assert [len(segment.token_ids) for segment in drawn] == [4], (
            "the turn that was given up is no part of the sample"
        )
