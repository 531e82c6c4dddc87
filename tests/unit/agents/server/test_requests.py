"""Each field of a request is used, has no effect, or is refused by name; no request ends the server or a run."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from interlace.agents.server.anthropic import count_ask
from interlace.agents.server.body import ApiError, Body
from interlace.agents.server.requests import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    GenerateRequest,
    MessagesRequest,
    RequestModel,
    ResponsesRequest,
)
from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall
from interlace.core.types import JSON, SampleKey, SamplingParams
from interlace.models.tiny import build_tokenizer
from interlace.rollouts.base import Session
from interlace.rollouts.config import create_kind, parse_episode
from interlace.run.serve import TokenizerCodec
from tests.support.episode_runs import samples_of
from tests.support.scripted_session import ScriptedSession
from tests.unit.agents.server.test_server import ASK, HELLO, Client, served

pytest.importorskip("aiohttp")
MINIMAL: Mapping[type[RequestModel], dict[str, JSON]] = {
    ChatRequest: ASK,
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {**ASK, "max_tokens": 8},
    CountRequest: ASK,
    GenerateRequest: {"token_ids": [5]},
}
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize("model", MINIMAL, ids=lambda model: model.__name__)
def test_a_field_that_no_route_knows_is_refused_by_name(model: type[RequestModel]) -> None:
    Body(MINIMAL[model]).read(model)
    for name in ("structured_outputs", "guided_json", "bad_words", "use_beam_search", "typo"):
        with pytest.raises(ApiError, match=f"the field '{name}' is not supported here") as found:
            Body({**MINIMAL[model], name: 1}).read(model)
        assert found.value.status == 400 and found.value.param == name


@pytest.mark.parametrize("model", MINIMAL, ids=lambda model: model.__name__)
def test_an_unknown_field_that_is_null_counts_as_left_out(model: type[RequestModel]) -> None:
    assert Body({**MINIMAL[model], "guided_json": None, "typo": None}).read(model) == Body(MINIMAL[model]).read(model)


FUNCTION = {"name": "add", "description": None, "parameters": None, "strict": None}
CALL = {"id": None, "type": "function", "function": {"name": "add", "arguments": None}}
SAID = {"role": "assistant", "content": None, "name": None, "tool_calls": [CALL], "reasoning_content": None}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": None, "text": None, "input": None, "name": None}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}),
        (ChatRequest, {"messages": [*ASK["messages"], SAID], "tools": [{"type": "function", "function": FUNCTION}]}),
        (ChatRequest, {"response_format": {"type": "text", "json_schema": None}}),
        (ChatRequest, {"chat_template_kwargs": {"enable_thinking": None}}),
        (ResponsesRequest, {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None}}),
        (ResponsesRequest, {"input": [{"role": "user", "content": "hi", "type": None, "call_id": None, "name": None}]}),
        (ResponsesRequest, {"input": [{"type": "function_call", "name": "add", "arguments": None}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [RESULT]}]}),
        (MessagesRequest, {"tool_choice": {"type": "auto", "name": None}, "output_config": {"effort": None}}),
        (GenerateRequest, {"sampling_params": None}),
        (GenerateRequest, {"sampling_params": {"logprobs": None, "prompt_logprobs": None, "stop": None}}),
    ],
)
def test_a_null_inside_a_part_counts_as_left_out(model: type[RequestModel], fields: dict[str, JSON]) -> None:
    request = Body({**MINIMAL[model], **fields}).read(model)
    if isinstance(request, ChatRequest):
        messages = [one.message("messages") for one in request.messages]
        assert [call.arguments for call in messages[-1].tool_calls] in ([], [{}])
        assert [tool.description for tool in request.list_tools()] in ([], [""])


@pytest.mark.parametrize(
    ("model", "name", "value", "harmless"),
    [
        (ChatRequest, "tool_choice", {"type": "function", "function": {"name": "add"}}, "auto"),
        (ChatRequest, "functions", [], None),
        (ChatRequest, "response_format", JSON_FORM, {"type": "text"}),
        (ChatRequest, "top_logprobs", 5, 0),
        (ChatRequest, "continue_final_message", True, False),
        (ChatRequest, "min_tokens", 6, 0),
        (ChatRequest, "frequency_penalty", 0.5, 0.0),
        (ChatRequest, "reasoning_effort", "high", None),
        (ChatRequest, "n", 129, 128),
        (CompletionRequest, "logprobs", 3, 0),
        (CompletionRequest, "echo", True, False),
        (CompletionRequest, "best_of", 2, 1),
        (ResponsesRequest, "text", {"format": JSON_FORM}, {"format": {"type": "text"}}),
        (ResponsesRequest, "top_logprobs", 5, 0),
        (ResponsesRequest, "include", ["message.output_text.logprobs"], []),
        (MessagesRequest, "output_config", {"format": JSON_FORM}, {}),
        (MessagesRequest, "output_format", JSON_FORM, None),
        (MessagesRequest, "thinking", {"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}),
        (MessagesRequest, "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, {}),
        (MessagesRequest, "context_management", {"edits": 5}, {"edits": None}),
        (MessagesRequest, "tool_choice", {"type": "any"}, {"type": "auto"}),
        (CountRequest, "temperature", 1.0, None),
    ],
)
def test_a_value_that_would_change_the_answer_and_cannot_is_refused(
    model: type[RequestModel], name: str, value: JSON, harmless: JSON
) -> None:
    with pytest.raises(ApiError, match=name):
        Body({**MINIMAL[model], name: value}).read(model)
    if harmless is not None:
        further = {"metadata": {}, "client_metadata": {}} if model is ChatRequest else {}
        Body({**MINIMAL[model], **further, name: harmless}).read(model)


def test_messages_of_recent_claude_clients_are_read() -> None:
    """They put system messages among the others, and leave the amount of thinking to the model."""
    session = ScriptedSession([HELLO])
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Tools: none."}]},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Now in French."},
    ]
    further = {
        "thinking": {"type": "adaptive", "budget_tokens": 0},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }

    async def use(client: Client) -> None:
        body = {"max_tokens": 8, "system": "Be brief.", "messages": messages, **further}
        assert (await client.post("/v1/messages", body))["content"]
        said = [(message.role, message.content) for message in session.asked[0][0]]  # type: ignore[attr-defined]
        assert said == [("system", "Be brief.\n\nTools: none."), ("user", "hi"), ("system", "Now in French.")]

    served(session, use)


@pytest.mark.parametrize(
    ("role", "kind", "right"),
    [("system", "tool_use", "assistant"), ("system", "tool_result", "user"), ("user", "tool_use", "assistant")],
)
def test_a_tool_block_in_a_message_of_another_role_is_refused(role: str, kind: str, right: str) -> None:
    """A first system message lost its calls without a word."""
    messages = [{"role": role, "content": [{"type": kind, "name": "add", "id": "a"}]}, *ASK["messages"]]
    with pytest.raises(ApiError, match=f"role {role} and has a block of type '{kind}': .* of the role {right}"):
        count_ask(Body({"messages": messages}).read(CountRequest))


def test_a_prefill_is_refused_by_messages() -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]
    with pytest.raises(ApiError, match="cannot continue it"):
        Body({"messages": messages, "max_tokens": 4}).read(MessagesRequest)


def test_a_client_that_wants_one_call_gets_the_first_and_its_next_turn_continues_both() -> None:
    calls = tuple(ToolCall(id=f"abcdefgh{name}", name=name, arguments={}) for name in "ab")
    both = Message(role="assistant", content="", tool_calls=calls)
    session = ScriptedSession([both, both, both, HELLO])

    async def use(client: Client) -> None:
        [choice] = (await client.post("/v1/chat/completions", {**ASK, "parallel_tool_calls": False}))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["a"]
        [item] = (await client.post("/v1/responses", {"input": "hi", "parallel_tool_calls": False}))["output"]
        assert item["name"] == "a"
        choices = {"type": "auto", "disable_parallel_tool_use": True}
        [block] = (await client.post("/v1/messages", {**ASK, "max_tokens": 9, "tool_choice": choices}))["content"]
        assert block["name"] == "a"
        await client.post("/v1/chat/completions", {"messages": [*ASK["messages"], choice["message"]]})
        assert session.asked[3][0][1] == both

    served(session, use)


def test_the_next_turn_continues_an_answer_of_whose_calls_one_could_not_be_read() -> None:
    calls = (ToolCall(id="abcdefgha", name="a"), ToolCall(id="abcdefghb", name="", error="not valid JSON"))
    both = Message(role="assistant", content="", tool_calls=calls)
    session = ScriptedSession([both, HELLO])

    async def use(client: Client) -> None:
        [choice] = (await client.post("/v1/chat/completions", ASK))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["a"]
        await client.post("/v1/chat/completions", {"messages": [*ASK["messages"], choice["message"]]})
        assert session.asked[1][0][1] == both

    served(session, use)


def test_end_tokens_and_template_variables_of_a_client_reach_the_session() -> None:
    session = ScriptedSession([HELLO] * 3, SamplingParams(stop_token_ids=(2,)))

    async def use(client: Client) -> None:
        await client.post("/v1/chat/completions", {**ASK, "stop_token_ids": [7], "max_tokens": 5})
        assert session.asked[0][2].stop_token_ids == (2, 7)
        variables = {"enable_thinking": False}
        await client.post("/v1/chat/completions", {**ASK, "ignore_eos": True, "chat_template_kwargs": variables})
        assert session.asked[1][2].stop_token_ids == () and session.options[1].chat_template_kwargs == variables
        body = {"token_ids": [5], "sampling_params": {"stop_token_ids": [9]}}
        await client.post("/inference/v1/generate", body)
        assert session.asked[2][2].stop_token_ids == (2, 9)

    served(session, use)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", {"prompt": [5]}, {"Authorization": "Bearer schl\u00fcssel"}, 401),
        ("/v1/completions", {"prompt": [5]}, {"X-Turn": "9" * 5000}, 400),
        ("/v1/completions", {"prompt": [5]}, {"X-Turn": "\u00b2"}, 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', {}, 400),
        ("/v1/completions", b'{"prompt": [5], "temperature": 1' + b"0" * 400 + b"}", {}, 400),
        ("/v1/completions", b'{"prompt": [5], "temperature": 1' + b"0" * 5000 + b"}", {}, 400),
        ("/v1/completions", b'{"prompt": [5], "temperature": NaN}', {}, 400),
        ("/v1/completions", {"prompt": [5], "logit_bias": {"9" * 5000: 1}}, {}, 400),
        ("/v1/completions", {"prompt": [5], "logit_bias": {"\u00b2": 1}}, {}, 400),
        ("/v1/completions", {"prompt": [2**40]}, {}, 400),
        ("/v1/completions", {"prompt": [-1]}, {}, 400),
        ("/inference/v1/generate", {"token_ids": [2**70]}, {}, 400),
        ("/v1/completions", {"prompt": [5], "stop_token_ids": [2**31]}, {}, 400),
        ("/v1/completions", {"prompt": [5], "stop_token_ids": [*range(257)]}, {}, 400),
        ("/v1/completions", {"prompt": [5], "n": 129}, {}, 400),
        ("/v1/completions", {"prompt": [5], "max_tokens": 2**70}, {}, 400),
        ("/v1/completions", b"[" * 100_000, {}, 400),
        ("/v1/session/reward", b'{"reward": 1' + b"0" * 400 + b"}", {}, 400),
        ("/control/pause", {}, {"Authorization": "Bearer schl\u00fcssel"}, 401),
    ],
)
def test_a_mistake_of_a_client_is_never_the_servers_error(
    path: str, body: object, headers: dict[str, str], status: int
) -> None:
    async def use(client: Client) -> None:
        found = await client.post(path, body, **headers)
        assert client.status == status and found["error"]["message"]

    served(ScriptedSession([HELLO]), use)


def test_the_scheme_of_a_key_has_no_case() -> None:
    async def use(client: Client) -> None:
        await client.post("/v1/chat/completions", ASK, Authorization=f"bearer {client.key}")
        assert client.status == 200

    served(ScriptedSession([HELLO]), use)


class Held:
    """A codec that tokenizes until it is told to stop."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        assert self.may_end.wait(15)
        return [5]

    def spell(self, token_id: int) -> bytes:
        return str(token_id).encode()


def test_the_server_answers_others_while_a_long_prompt_is_tokenized() -> None:
    codec = Held()

    async def use(client: Client) -> None:
        asking = asyncio.create_task(client.post("/v1/completions", {"prompt": "1" * (1 << 20)}))
        assert await asyncio.to_thread(codec.has_begun.wait, 15)
        async with client.http.get(client.url + "/health") as response:
            assert await response.json() == {"status": "ok"}
        codec.may_end.set()
        assert (await asking)["choices"]

    served(ScriptedSession([HELLO]), use, codec=codec)


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized() -> None:
    codec = TokenizerCodec(build_tokenizer(1024, chat=True), max_tokens=1000)
    assert codec.encode("12+34")
    with pytest.raises(UserError, match="8388608 characters, which are at least"):
        codec.encode("1" * (8 << 20))


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    backend = build_tokenizer(1024, chat=True).backend_tokenizer
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    codec = TokenizerCodec(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    assert codec.encode("<s>hi") == codec.encode("hi") and codec.encode("hi")[:2] != [bos, bos]


def test_one_model_and_the_tokens_of_messages() -> None:
    class Guests:
        @asynccontextmanager
        async def session(self, seed: int | None) -> AsyncIterator[Session]:
            yield ScriptedSession([])

        def busy_s(self) -> None:
            return None

    async def use(client: Client) -> None:
        for key in (client.key, "sk-mine"):
            client.key = key
            assert await client.post("/v1/messages/count_tokens", {**ASK, "system": "be brief"}) == {"input_tokens": 2}
            async with client.http.get(client.url + "/v1/models/policy", headers={"x-api-key": key}) as response:
                assert (await response.json())["id"] == "policy"
        await client.post("/v1/messages/count_tokens", {})
        assert client.status == 400

    served(ScriptedSession([]), use, visitors=Guests(), api_key="sk-mine")


BROKEN = (
    {"presence_penalty": -1e300}, {"logit_bias": {"5": 1e39}}, {"repetition_penalty": 1e-300}, {"top_k": 2**70},
    {"logit_bias": {str(token): float("-inf") for token in range(4000)}}, {"prompt": [4_000_000]},
)  # fmt: skip
STATUSES: list[int] = []


def sends_what_overflows(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    """A program whose requests have no distribution, and which then asks well."""
    for more in ({}, *BROKEN, {}):
        body = json.dumps({"prompt": [5, 6], "max_tokens": 4, **more}).encode()
        request = urllib.request.Request(f"{base_url}/completions", body, {"Authorization": f"Bearer {api_key}"})
        try:
            with urllib.request.urlopen(request) as response:
                STATUSES.append(response.status)
        except urllib.error.HTTPError as error:
            STATUSES.append(error.code)
    return 1.0


def test_a_program_that_sets_the_distribution_cannot_end_its_run() -> None:
    STATUSES.clear()
    settings = {"name": "program", "function": f"{__name__}:sends_what_overflows", "distribution": "client"}
    failures: dict[SampleKey, str] = {}
    rows = samples_of(create_kind(parse_episode(settings)).create(), failures, num_prompts=1)
    assert len(rows) == 2 and not failures
    assert sorted(STATUSES) == [200] * 4 + [400] * 2 * len(BROKEN)


def test_a_message_with_a_picture_names_the_part() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ApiError, match=r"messages\[0\]\.content = .*part of type 'image_url': only text can be read"):
        Body({"messages": [picture]}).read(ChatRequest)
    assert Body({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}).read(
        ChatRequest
    ).messages[0].message("it") == Message(role="user", content="hi")


def test_the_end_token_of_a_tokenizer_is_no_part_of_a_prompt() -> None:
    from tokenizers import processors

    tokenizer = build_tokenizer(1024, chat=True)
    plain, end = TokenizerCodec(tokenizer).encode("hi"), str(tokenizer.eos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    codec = TokenizerCodec(tokenizer)
    assert codec.encode("hi") == plain and codec.encode("hi" + end) == [*plain, tokenizer.eos_token_id]
