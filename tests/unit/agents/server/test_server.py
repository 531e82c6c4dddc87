"""The server of sessions over HTTP answers correctly, generates each answer once, and refuses invalid input."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from interlace.agents.server import app, conversation
from interlace.agents.server.app import SessionServer, serving
from interlace.agents.server.body import ApiError, Body
from interlace.agents.server.conversation import Conversation
from interlace.agents.server.requests import ChatRequest
from interlace.core.messages import Message, ToolCall
from interlace.core.types import FinishReason, SamplingParams
from interlace.rollouts.base import Session
from tests.support.scripted_session import ScriptedSession

aiohttp = pytest.importorskip("aiohttp")
HELLO = Message(role="assistant", content="hello")
CALL = Message(role="assistant", content="", tool_calls=(ToolCall(id="abcdefghi", name="add", arguments={"a": 1}),))
ASK = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


class Client:
    """One session, as a program sees it."""

    def __init__(self, http: "aiohttp.ClientSession", url: str, key: str, conversation: Conversation | None) -> None:
        self.http, self.url, self.key, self.conversation = http, url, key, conversation
        self.status, self.headers = 0, {}

    async def post(self, path: str, body: object, **headers: str) -> dict:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(
            self.url + path, data=data, headers={"Authorization": f"Bearer {self.key}", **headers}
        ) as response:
            self.status, self.headers = response.status, response.headers
            return json.loads(await response.read())

    async def events(self, path: str, body: object) -> list[tuple[str, object]]:
        async with self.http.post(self.url + path, json=body, headers={"x-api-key": self.key}) as response:
            blocks = (await response.text()).strip().split("\n\n")
        found = []
        for block in blocks:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append(
                (lines.get("event", ""), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]))
            )
        return found


def served(session: Session, use: Callable[[Client], Awaitable[None]], **settings: object) -> None:
    async def main() -> None:
        server = SessionServer(**settings)
        async with serving(server) as url, aiohttp.ClientSession() as http:
            conversation, endpoint = server.open(session)
            await asyncio.wait_for(use(Client(http, url, endpoint.api_key, conversation)), 20)

    asyncio.run(main())


def test_answer_carries_tokens_logprobs_and_versions_where_asked_for() -> None:
    async def use(client: Client) -> None:
        found = await client.post("/v1/chat/completions", {**ASK, "logprobs": True, "return_token_ids": True})
        [choice] = found["choices"]
        assert choice["message"]["content"] == "hello" and choice["finish_reason"] == "stop"
        assert found["prompt_token_ids"] == [0, 1, 2, 3, 4] and choice["token_ids"] == [11, 12, 2]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.5, -0.25, -1.0]
        assert choice["weight_versions"] == [[3, 2], [4, 1]] and client.headers["x-weight-versions"] == "3-4"
        assert found["usage"]["prompt_tokens"] == 5 and found["usage"]["completion_tokens"] == 3
        plain = await client.post("/v1/chat/completions", ASK)
        assert "prompt_token_ids" not in plain and plain["choices"][0]["logprobs"] is None

    served(ScriptedSession([HELLO, HELLO]), use)


def test_calls_of_tools_go_out_and_come_back_as_the_model_wrote_them() -> None:
    session = ScriptedSession([CALL, HELLO])

    async def use(client: Client) -> None:
        ask = {**ASK, "tools": [{"type": "function", "function": TOOL}]}
        [choice] = (await client.post("/v1/chat/completions", ask))["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "2"}]}
        await client.post("/v1/chat/completions", {**ask, "messages": [*ASK["messages"], choice["message"], result]})
        messages, tools, _ = session.asked[1]
        assert messages[1] == CALL and messages[2].content == "2" and [tool.name for tool in tools] == ["add"]

    served(session, use)


def test_streams_end_with_usage_and_say_the_same() -> None:
    async def use(client: Client) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = await client.events("/v1/chat/completions", {**ASK, **options})
        chunks = [data for _, data in events if isinstance(data, dict)]
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"])
        assert text == "hello" and chunks[-1]["usage"]["total_tokens"] == 8 and events[-1][1] == "[DONE]"
        events = await client.events("/v1/responses", {"input": "hi", "stream": True})
        assert events[0][0] == "response.created" and events[-1][0] == "response.completed"
        events = await client.events("/v1/messages", {**ASK, "max_tokens": 9, "stream": True})
        assert [name for name, _ in events][-1] == "message_stop"
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        assert "".join(delta["partial_json"] for delta in deltas) == '{"a": 1}'

    served(ScriptedSession([HELLO, HELLO, CALL]), use)


def test_other_dialects_say_the_same() -> None:
    session = ScriptedSession([HELLO, CALL, CALL, HELLO])

    async def use(client: Client) -> None:
        found = await client.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}})
        assert found["choices"][0]["token_ids"] == [11, 12, 2] and session.asked[0][0] == [5, 6]
        assert session.asked[0][2].max_new_tokens == 3
        tools = [{"type": "function", **TOOL}]
        found = await client.post("/v1/responses", {"input": "hi", "instructions": "be brief", "tools": tools})
        [item] = found["output"]
        assert item["type"] == "function_call" and json.loads(item["arguments"]) == {"a": 1}
        assert [message.role for message in session.asked[1][0]] == ["system", "user"]
        ask = {**ASK, "max_tokens": 5, "tools": [{"name": "add", "input_schema": TOOL["parameters"]}]}
        found = await client.post("/v1/messages", ask)
        [block] = found["content"]
        assert found["stop_reason"] == "tool_use" and block["input"] == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
        said = [*ASK["messages"], {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        found = await client.post("/v1/messages", {**ask, "messages": said})
        assert found["stop_reason"] == "end_turn" and session.asked[3][0][1] == CALL

    served(session, use)


def test_the_run_keeps_its_distribution_and_the_client_its_length_and_stops() -> None:
    session = ScriptedSession(
        [Message(role="assistant", content="so Observation: no")], SamplingParams(temperature=0.7)
    )

    async def use(client: Client) -> None:
        ask = {**ASK, "temperature": 0.0, "top_p": 0.1, "max_tokens": 9, "stop": "Observation:"}
        found = await client.post("/v1/chat/completions", ask)
        assert found["choices"][0]["message"]["content"] == "so "
        params = session.asked[0][2]
        assert (params.temperature, params.top_p, params.max_new_tokens) == (0.7, 1.0, 9)
        assert params.stop == ("Observation:",)

    served(session, use)


def test_answer_that_was_cut_for_its_client_goes_on_as_it_was_drawn() -> None:
    drawn = Message(role="assistant", content="so Observation:")
    session = ScriptedSession([drawn, HELLO])

    async def use(client: Client) -> None:
        ask = {**ASK, "stop": ["Observation:"]}
        [choice] = (await client.post("/v1/chat/completions", ask))["choices"]
        await client.post("/v1/chat/completions", {**ask, "messages": [*ASK["messages"], choice["message"]]})
        assert session.asked[1][0][1] == drawn

    served(session, use)


def test_several_answers_are_several_turns() -> None:
    session = ScriptedSession([HELLO, CALL])

    async def use(client: Client) -> None:
        choices = (await client.post("/v1/chat/completions", {**ASK, "n": 2}))["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls"]
        assert len(session.asked) == 2

    served(session, use)


def test_a_client_that_hangs_up_withdraws_its_request() -> None:
    session = ScriptedSession([HELLO], go=asyncio.Event())

    async def use(client: Client) -> None:
        asking = asyncio.create_task(client.post("/v1/chat/completions", ASK))
        while not session.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not session.num_withdrawn:
            await asyncio.sleep(0.01)
        assert not session.turns

    served(session, use)


def test_a_retry_after_a_lost_connection_finds_the_request_still_in_flight() -> None:
    session = ScriptedSession([HELLO], go=asyncio.Event())

    async def use(client: Client) -> None:
        first, second = (
            asyncio.create_task(client.post("/v1/chat/completions", ASK, **{"Idempotency-Key": "k"})) for _ in range(2)
        )
        while client.conversation.retries.num_retries < 1:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        session.go.set()
        found = await second
        assert found["choices"][0]["message"]["content"] == "hello" and len(session.asked) == 1

    served(session, use)


def test_reward_and_end_and_what_comes_after() -> None:
    async def use(client: Client) -> None:
        await client.post("/v1/session/reward", {"reward": 0.25})
        assert client.conversation.reward == 0.25
        await client.post("/v1/session/reward", {"reward": "much"})
        assert client.status == 400
        assert await client.post("/v1/session/end", {"reward": 1}) == {"turns": 0, "reward": 1.0}
        found = await client.post("/v1/chat/completions", ASK)
        assert client.status == 409 and found["error"]["code"] == "session_ended"
        assert client.headers["x-should-retry"] == "false"

    served(ScriptedSession([HELLO]), use)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"{", 400, "not valid JSON"),
        ("/v1/chat/completions", b"[1]", 400, "must be an object"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages = []: it is empty"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "'wizard'"),
        ("/v1/chat/completions", {**ASK, "temperature": "hot"}, 400, "temperature = \"hot\": it must be a number"),
        ("/v1/chat/completions", {**ASK, "n": 0}, 400, "at least 1"),
        ("/v1/chat/completions", {**ASK, "response_format": {"type": "json_object"}}, 400, "cannot be forced"),
        ("/v1/chat/completions", {**ASK, "tools": [{"type": "function", "function": TOOL}] * 2}, 400, "two tools"),
        ("/v1/chat/completions", {**ASK, "tools": [{"type": "function"}]}, 400, "parameters: JSON schema"),
        ("/v1/completions", {"prompt": "text"}, 400, "give token ids"),
        ("/v1/completions", {"prompt": [[1]] * 300, "n": 10}, 400, "at most 2048 answers"),
        ("/v1/completions", {"prompt": [[1], []]}, 400, "it is empty"),
        ("/inference/v1/generate", {"token_ids": [1.5]}, 400, "token_ids[0] = 1.5: it must be a whole number"),
        ("/v1/responses", {"input": "hi", "previous_response_id": "x"}, 400, "not stored"),
        ("/v1/embeddings", {}, 404, "Not Found"),
        ("/v1/session/reward", {}, 400, "finite number"),
        ("/control/pause", {}, 401, "administrator's key"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_openais_form(path: str, body: object, status: int, says: str) -> None:
    async def use(client: Client) -> None:
        found = await client.post(path, body)
        assert client.status == status and says in found["error"]["message"]

    served(ScriptedSession([HELLO]), use)


def test_limits_wrong_keys_and_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LARGEST_BODY", 1000)

    async def use(client: Client) -> None:
        found = await client.post("/v1/chat/completions", ASK)
        assert client.status == 400 and "episode.max_turns" in found["error"]["message"]
        found = await client.post("/v1/messages", b" " * 2000)
        assert client.status == 413 and found["type"] == "error"
        client.key = "sk-other"
        found = await client.post("/v1/chat/completions", ASK)
        assert client.status == 401 and "Authorization: Bearer KEY" in found["error"]["message"]

    served(ScriptedSession([]), use)


def test_clients_of_the_servers_own_key_have_a_session_each_and_wait_while_weights_change() -> None:
    opened: list[int | None] = []

    class Guests:
        busy: float | None = None

        @asynccontextmanager
        async def session(self, seed: int | None) -> AsyncIterator[Session]:
            opened.append(seed)
            yield ScriptedSession([HELLO], finish_reason=FinishReason.LENGTH)

        def busy_s(self) -> float | None:
            return self.busy

    guests = Guests()

    async def use(client: Client) -> None:
        client.key = "sk-mine"
        for _ in range(2):
            found = await client.post("/v1/chat/completions", {**ASK, "seed": 3}, **{"X-Turn": "0"})
            assert found["choices"][0]["finish_reason"] == "length"
        assert opened == [3, 3]
        session = await client.post("/v1/sessions", {})
        guests.busy = 2.0
        found = await client.post("/v1/chat/completions", ASK)
        assert client.status == 503 and client.headers["Retry-After"] == "2"
        client.key = session["api_key"]  # goes on: an open session waits by itself
        assert (await client.post("/v1/chat/completions", ASK))["choices"]
        await client.post("/v1/sessions", {})
        assert client.status == 401

    served(ScriptedSession([]), use, visitors=guests, api_key="sk-mine")


def test_health_needs_no_key_and_metrics_count() -> None:
    async def use(client: Client) -> None:
        await client.post("/v1/chat/completions", ASK)
        await client.post("/v1/chat/completions", b"{")
        async with client.http.get(client.url + "/health") as response:
            assert await response.json() == {"status": "ok"}
        async with client.http.get(client.url + "/metrics") as response:
            assert response.status == 401
        async with client.http.get(client.url + "/metrics", headers={"x-api-key": client.key}) as response:
            lines = (await response.text()).splitlines()
        assert 'interlace_requests_total{route="/v1/chat/completions",status="200"} 1' in lines
        assert 'interlace_requests_total{route="/v1/chat/completions",status="400"} 1' in lines
        assert "interlace_drawn_tokens_total 3" in lines and "interlace_sessions 1" in lines

    served(ScriptedSession([HELLO]), use)


def test_a_session_that_its_client_leaves_open_ends() -> None:
    closed = asyncio.Event()

    class Guests:
        @asynccontextmanager
        async def session(self, seed: int | None) -> AsyncIterator[Session]:
            yield ScriptedSession([])
            closed.set()

        def busy_s(self) -> float | None:
            return None

    async def use(client: Client) -> None:
        client.key = "sk-mine"
        client.key = (await client.post("/v1/sessions", {}))["api_key"]
        await asyncio.wait_for(closed.wait(), 10)
        await client.post("/v1/chat/completions", ASK)
        assert client.status == 409
        async with client.http.get(client.url + "/metrics", headers={"x-api-key": "sk-mine"}) as response:
            assert "interlace_sessions 1" in (await response.text()).splitlines(), "of the process alone"

    served(ScriptedSession([]), use, visitors=Guests(), api_key="sk-mine", idle_s=0.05)


def test_keys_of_long_ended_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "KEPT_SESSIONS", 1)

    class Guests:
        @asynccontextmanager
        async def session(self, seed: int | None) -> AsyncIterator[Session]:
            yield ScriptedSession([])

        def busy_s(self) -> float | None:
            return None

    async def use(client: Client) -> None:
        keys = []
        for _ in range(2):
            client.key = "sk-mine"
            client.key = (await client.post("/v1/sessions", {}))["api_key"]
            keys.append(client.key)
            await client.post("/v1/session/end", {})
            await client.post("/v1/chat/completions", ASK)
            assert client.status == 409
        client.key = keys[0]
        await client.post("/v1/chat/completions", ASK)
        assert client.status == 401
        async with client.http.get(client.url + "/metrics", headers={"x-api-key": "sk-mine"}) as response:
            assert "interlace_sessions 1" in (await response.text()).splitlines()

    served(ScriptedSession([]), use, visitors=Guests(), api_key="sk-mine")


@pytest.mark.parametrize(("name", "value"), [("n", True), ("n", 1.5), ("n", "2")])
def test_a_field_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(ApiError, match=r"n = .*: it must be a whole number"):
        Body({**ASK, name: value}).read(ChatRequest)


def test_openais_own_client_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    openai = pytest.importorskip("openai")

    async def use(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key=client.key, max_retries=0) as theirs:
            answer = await theirs.chat.completions.create(model="gpt", messages=ASK["messages"])
            assert answer.choices[0].message.content == "hello"
            stream: Sequence[object] = [
                chunk.choices[0].delta.content
                async for chunk in await theirs.chat.completions.create(
                    model="gpt", messages=ASK["messages"], stream=True
                )
            ]
            assert "".join(map(str, stream[:-1])) == "hello" and len(stream) > 3
            assert (await theirs.responses.create(model="gpt", input="hi")).output_text == "hello"
            assert [model.id for model in (await theirs.models.list()).data] == ["policy"]

    served(ScriptedSession([HELLO] * 3), use)
