"""A repeated request is answered once, and different requests with equal bodies are not taken for repeated ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from interlace.agents.episodes.environment import exclude_turns
from interlace.rollouts.base import Session
from tests.support.engine_servers import wait_until
from tests.support.scripted_session import ScriptedSession
from tests.unit.agents.server.test_server import ASK, CALL, HELLO, Client, served


class Guests:
    """Sessions of clients with the server's key, which answer when `go` is set."""

    def __init__(self) -> None:
        self.num_opened, self.go = 0, asyncio.Event()
        self.wait_s: float | None = None
        """Seconds to wait that a busy server states."""

    @asynccontextmanager
    async def session(self, seed: int | None) -> AsyncIterator[Session]:
        self.num_opened += 1
        yield ScriptedSession([HELLO], go=self.go)

    def busy_s(self) -> float | None:
        return self.wait_s


def test_a_retry_is_answered_once_and_recorded_once() -> None:
    session = ScriptedSession([HELLO, CALL], go=asyncio.Event())

    async def use(client: Client) -> None:
        both = [asyncio.create_task(client.post("/v1/chat/completions", ASK)) for _ in range(2)]
        while not session.asked:
            await asyncio.sleep(0.01)
        session.go.set()
        one, other = await asyncio.gather(*both)
        assert one == other and len(session.asked) == 1
        named = [await client.post("/v1/chat/completions", ASK, **{"Idempotency-Key": "k"}) for _ in range(2)]
        assert named[0] == named[1] and len(session.asked) == 2
        for ask, more in (({**ASK, "n": 2}, {}), (ASK, {"X-Turn": "7"})):
            refused = await client.post("/v1/chat/completions", ask, **{"Idempotency-Key": "k", **more})
            assert client.status == 400 and "another body, X-Turn, X-Session-ID or route" in refused["error"]["message"]

    served(session, use)


def test_turns_with_numbers_of_their_own_are_separate_requests_although_their_bodies_are_equal() -> None:
    """A program that sampled several answers at once got one answer several times."""
    session = ScriptedSession([HELLO, CALL], go=asyncio.Event())

    async def use(client: Client) -> None:
        asks = [client.post("/v1/chat/completions", ASK, **{"X-Turn": str(number)}) for number in range(2)]
        asked = asyncio.gather(*asks)
        await asyncio.to_thread(wait_until, lambda: len(session.asked) >= 2, 15)
        session.go.set()
        await asked
        assert sorted(turn.number for turn in session.turns) == [0, 1]

    served(session, use)


def test_turns_of_agents_that_are_not_trained_are_excluded() -> None:
    """In an environment of verifiers 0.4 with several agents, the turns of a simulated user were trained."""
    session = ScriptedSession([HELLO, HELLO, HELLO], go=asyncio.Event())

    async def use(client: Client) -> None:
        agents = [{"X-Session-ID": "policy"}, {"X-Session-ID": "user"}, {}]
        asked = asyncio.gather(*[client.post("/v1/chat/completions", ASK, **agent) for agent in agents])
        await asyncio.to_thread(wait_until, lambda: len(session.asked) >= 3, 15)  # equal bodies, three requests
        session.go.set()
        await asked
        [turn] = client.conversation.turns_by_agent["user"]
        valid = exclude_turns(client.conversation.turns_by_agent, {"policy"})
        assert [*valid] == [turn.number] and valid[turn.number].tolist() == [False] * len(turn.token_ids)

    served(session, use)


def test_a_repeated_turn_is_one_request_although_its_client_counts_no_retry() -> None:
    """A program that repeats a request by itself, with a new call of OpenAI's client, recorded the turn twice."""
    session = ScriptedSession([HELLO, CALL], go=asyncio.Event())
    headers = {"X-Turn": "0", "X-Stainless-Retry-Count": "0"}

    async def use(client: Client) -> None:
        both = [asyncio.create_task(client.post("/v1/chat/completions", ASK, **headers)) for _ in range(2)]
        await asyncio.to_thread(
            wait_until, lambda: len(session.asked) + client.conversation.retries.num_retries >= 2, 15
        )
        session.go.set()
        one, other = await asyncio.gather(*both)
        assert one == other and len(session.turns) == 1

    served(session, use)


def test_equal_first_requests_of_openais_client_are_separate_turns() -> None:
    """An agent that voted over several answers got one answer several times."""
    openai = pytest.importorskip("openai")
    session = ScriptedSession([HELLO, HELLO], go=asyncio.Event())

    async def use(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key=client.key) as theirs:
            asked = [theirs.chat.completions.create(model="gpt", messages=ASK["messages"]) for _ in range(2)]
            both = asyncio.gather(*asked)
            await asyncio.to_thread(wait_until, lambda: len(session.asked) >= 2, 15)
            session.go.set()
            await both
            assert len(session.turns) == 2

    served(session, use)


def test_retries_of_equal_requests_that_were_refused_are_separate_requests() -> None:
    """Clients that repeated equal requests after a status 503, at the same time, all got one answer."""
    guests = Guests()

    async def use(client: Client) -> None:
        client.key = "sk-mine"
        guests.wait_s = 1.0
        for _ in range(2):
            await client.post("/v1/chat/completions", ASK, **{"X-Stainless-Retry-Count": "0"})
            assert client.status == 503
        guests.wait_s = None
        again = {"X-Stainless-Retry-Count": "1"}
        both = [asyncio.create_task(client.post("/v1/chat/completions", ASK, **again)) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: guests.num_opened >= 2, 15)
        guests.go.set()
        one, other = await asyncio.gather(*both)
        assert one["id"] != other["id"]

    served(ScriptedSession([]), use, visitors=guests, api_key="sk-mine")


def test_equal_requests_with_the_servers_key_are_separate_although_their_client_counts_no_retries() -> None:
    """A program that sampled several answers at once got one answer several times."""
    guests = Guests()

    async def use(client: Client) -> None:
        client.key = "sk-mine"
        both = [asyncio.create_task(client.post("/v1/chat/completions", ASK)) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: guests.num_opened >= 2, 15)
        guests.go.set()
        one, other = await asyncio.gather(*both)
        assert one["id"] != other["id"]

    served(ScriptedSession([]), use, visitors=guests, api_key="sk-mine")
