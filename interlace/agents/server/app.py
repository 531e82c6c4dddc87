"""The server of sessions: routes, keys and errors. It runs on aiohttp, in the event loop of its process."""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from interlace.agents.server.anthropic import AnthropicMessages, count_ask
from interlace.agents.server.ask import Answers, TextCodec
from interlace.agents.server.body import ApiError, Body, as_api_error, as_openai
from interlace.agents.server.chat import Chat, Completions, TokenGeneration
from interlace.agents.server.conversation import Asked, Conversation, OnDraft, Retries, Sessions, Visitors, digest_of
from interlace.agents.server.dialect import Dialect, json_response, stream_response
from interlace.agents.server.metrics import ServerMetrics
from interlace.agents.server.requests import CountRequest, RewardRequest, SessionRequest
from interlace.agents.server.responses import Responses
from interlace.core.errors import UserError
from interlace.core.tasks import cancel_tasks
from interlace.core.types import JSON
from interlace.rollouts.base import Session
from interlace.runtime.http_listener import HttpListener, is_same_key

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]

T = TypeVar("T")
LARGEST_BODY = 32 << 20
"""Bytes of a request's body: a context of a million tokens, as ids, has about 8 MB."""
IDLE_S = 3600.0
"""Seconds without a request after which a session that a client opened ends; at most a quarter later."""
LONG_BODY = 1 << 14
"""Body size in bytes from which a body is parsed on a thread, so that the event loop stays responsive."""
NUM_RETRIES = "X-Stainless-Retry-Count"
"""Header in which OpenAI's and Anthropic's clients state how often they have sent a request before."""
AGENT = "X-Session-ID"
"""Header in which `verifiers` 0.4 states which run of an agent sent a request; other clients send it as they like."""
MODEL = "policy"
"""Name of the model. A request may give any name, and its answer repeats the name."""
_DIALECTS: Mapping[str, type[Dialect]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": AnthropicMessages,
    "/inference/v1/generate": TokenGeneration,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAddress:
    """Address and key of a session, for a program."""

    base_url: str
    """Address for OpenAI's clients, which ends in /v1."""
    api_key: str

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables by which clients find the session."""
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class Control(Protocol):
    """Control verbs for the administrator."""

    async def command(self, verb: str) -> dict[str, JSON]:
        """Executes a verb. Raises ApiError for an unknown one."""


class SessionServer:
    """Server of sessions in this process's event loop; open from start() to close()."""

    def __init__(
        self,
        *,
        codec: TextCodec | None = None,
        visitors: Visitors | None = None,
        control: Control | None = None,
        add_routes: "Callable[[web.Application, str], None] | None" = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """visitors: if None, only sessions opened by this process are served. A key that is None is generated.
        add_routes: adds further routes, given the administrator's key. idle_s: see IDLE_S.
        """
        self.api_key = api_key or f"sk-{secrets.token_urlsafe(24)}"
        self.admin_key = admin_key or f"admin-{secrets.token_urlsafe(24)}"
        self.metrics = ServerMetrics()
        self._dialects = {path: kind(codec) for path, kind in _DIALECTS.items()}
        self._control, self._add_routes = control, add_routes
        self._sessions = Sessions(self.api_key, visitors)
        self._retries = Retries()
        self._url = ""
        self._listener = HttpListener()
        self._idle_s = idle_s
        self._sweep: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts to listen and returns the address. port: 0 takes a free port. Raises UserError if the server cannot
        listen.
        """
        try:
            from aiohttp import web
        except ImportError:
            raise UserError("the server of sessions needs aiohttp: pip install 'interlace[serve]'.") from None

        @web.middleware
        async def guard(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
            return await self._answer_safely(request, handler)

        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[guard])
        for path in self._dialects:
            app.router.add_post(path, self._ask)
        app.router.add_get("/health", _show_health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name:.+}", self._show_model)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/v1/sessions", self._open_session)
        app.router.add_post("/v1/session/reward", self._handle_reward)
        app.router.add_post("/v1/session/end", self._end_session)
        app.router.add_post("/control/{verb}", self._handle_command)
        if self._add_routes:
            self._add_routes(app, self.admin_key)
        self._url = await self._listener.start(app, host, port)
        self._sweep = asyncio.create_task(self._end_idle_sessions(), name="idle sessions")
        return self._url

    async def close(self) -> None:
        if self._sweep:
            await cancel_tasks([self._sweep])
        await self._sessions.end_conversations()
        await self._retries.close()
        await self._sessions.close()
        await self._listener.close()

    def open(
        self, session: Session, *, keeps_distribution: bool = True, patience_s: float = math.inf
    ) -> tuple[Conversation, SessionAddress]:
        """Opens a conversation with a new key. keeps_distribution, patience_s: see Conversation."""
        conversation = Conversation(session, keeps_distribution, patience_s)
        return conversation, self._admit_session(conversation)

    def _admit_session(self, conversation: Conversation) -> SessionAddress:
        self._sessions.add(conversation)
        self.metrics.sessions += 1
        return SessionAddress(base_url=f"{self._url}/v1", api_key=conversation.key)

    async def forget(self, conversation: Conversation) -> None:
        await conversation.end()
        self.metrics.sessions -= self._sessions.remove(conversation)

    async def _answer_safely(self, request: "web.Request", handler: "Handler") -> "web.StreamResponse":
        """Handles a request. Any exception becomes an error response in the client's format."""
        from aiohttp import web

        route = request.match_info.route.resource
        name, start_s = (route.canonical if route else "unknown"), time.perf_counter()
        dialect = self._dialects.get(request.path)
        self.metrics.running += 1
        try:
            response = await handler(request)
        except web.HTTPRequestEntityTooLarge:
            too_large = f"the body is larger than {LARGEST_BODY >> 20} MiB."
            response = _make_error_response(dialect, ApiError(413, too_large))
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}."
            response = _make_error_response(dialect, ApiError(error.status, what))
        except Exception as error:  # noqa: BLE001 - the client gets the reason, and the server continues
            response = _make_error_response(dialect, as_api_error(error))
        finally:
            self.metrics.running -= 1
        self.metrics.observe(name, response.status, time.perf_counter() - start_s)
        return response

    async def _ask(self, request: "web.Request") -> "web.StreamResponse":
        dialect = self._dialects[request.path]
        conversation = self._sessions.find(_read_key(request))
        if conversation:
            conversation.check_open()
        content, number, agent = await request.read(), _turn_number(request), request.headers.get(AGENT, "")
        ask, digest = await _on_thread(
            content, lambda: (dialect.read(Body.parse(content)), digest_of(request.path, content, number, agent))
        )
        named = request.headers.get("Idempotency-Key")
        retries = conversation.retries if conversation else self._retries
        before = retries.num_retries

        async def make(head: Answers, on_draft: OnDraft) -> Answers:
            if conversation:
                answers = await self._answer_request(conversation, head, on_draft, number)
                conversation.turns_by_agent.setdefault(agent, []).extend(answers.turns)
                return answers
            async with self._sessions.admit_client().session(head.ask.seed) as session:
                visit = Conversation(session, keeps_distribution=False)
                return await self._answer_request(visit, head, on_draft, None)

        def begin() -> Asked:
            return Asked(
                digest, Answers(id=dialect.prefix + secrets.token_hex(12), created=int(time.time()), ask=ask), make
            )

        if conversation:
            conversation.check_open()
        # Without a session nothing is recorded twice, so a client that counts no retries may send equal requests.
        counted = request.headers.get(NUM_RETRIES, "0" if conversation is None else None)
        is_first = number is None and counted == "0"
        with retries.begin_once(named, digest, begin, is_first=is_first) as asked:
            self.metrics.retries += retries.num_retries - before
            if asked.head.ask.stream:
                return await stream_response(request, dialect.stream(asked.head), asked)
            answer = await asked.answer()
            oldest, newest = answer.versions
            headers = {"x-weight-versions": f"{oldest}-{newest}", "x-request-id": answer.id}
            return json_response(dialect.write(answer), headers=headers)

    async def _answer_request(
        self, conversation: Conversation, head: Answers, on_draft: OnDraft, number: int | None
    ) -> Answers:
        answer = await conversation.answer(head, on_draft, number=number)
        self.metrics.prompt_tokens += answer.num_prompt_tokens
        self.metrics.drawn_tokens += answer.num_drawn_tokens
        return answer

    async def _open_session(self, request: "web.Request") -> "web.StreamResponse":
        if self._sessions.find(_read_key(request)) is not None:
            raise ApiError(401, "a session's key opens no other session.", code="invalid_api_key")
        seed = Body.parse(await request.read()).read(SessionRequest).seed
        stack = contextlib.AsyncExitStack()
        session = await stack.enter_async_context(self._sessions.admit_client().session(seed))
        endpoint = self._admit_session(Conversation(session, keeps_distribution=False, visit=stack))
        return json_response({"base_url": endpoint.base_url, "api_key": endpoint.api_key})

    async def _handle_reward(self, request: "web.Request") -> "web.StreamResponse":
        conversation = self._sessions.require(_read_key(request))
        conversation.set_reward(Body.parse(await request.read()).read(RewardRequest).reward)
        return json_response({"reward": conversation.reward})

    async def _end_session(self, request: "web.Request") -> "web.StreamResponse":
        conversation = self._sessions.require(_read_key(request))
        reward = Body.parse(await request.read()).read(RewardRequest).reward
        if reward is not None:
            conversation.set_reward(reward)
        conversation.check_open()
        await self._end_visit(conversation)
        return json_response({"turns": conversation.num_turns, "reward": conversation.reward})

    async def _end_visit(self, conversation: Conversation) -> None:
        await conversation.end()
        if visit := self._sessions.take_visit(conversation):
            self.metrics.sessions -= 1
            await visit.aclose()

    async def _end_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / 4)
            for conversation in self._sessions.list_idle(self._idle_s):
                if not conversation.is_idle(self._idle_s):
                    continue  # it was used while another one ended
                try:
                    await self._end_visit(conversation)
                except Exception:
                    logging.getLogger(__name__).exception("an idle session could not be closed")

    async def _show_metrics(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web

        if not is_same_key(_read_key(request), self.admin_key):
            self._sessions.find(_read_key(request))
        return web.Response(text=self.metrics.text(), content_type="text/plain")

    async def _list_models(self, request: "web.Request") -> "web.StreamResponse":
        self._sessions.find(_read_key(request))
        return json_response({"object": "list", "data": [_model(MODEL)]})

    async def _show_model(self, request: "web.Request") -> "web.StreamResponse":
        self._sessions.find(_read_key(request))
        return json_response(_model(request.match_info["name"]))

    async def _count_tokens(self, request: "web.Request") -> "web.StreamResponse":
        conversation = self._sessions.find(_read_key(request))
        content = await request.read()
        ask = await _on_thread(content, lambda: count_ask(Body.parse(content).read(CountRequest)))
        if conversation:
            return json_response({"input_tokens": await conversation.count_tokens(ask)})
        async with self._sessions.admit_client().session(None) as session:
            visit = Conversation(session, keeps_distribution=False)
            return json_response({"input_tokens": await visit.count_tokens(ask)})

    async def _handle_command(self, request: "web.Request") -> "web.StreamResponse":
        if not is_same_key(_read_key(request), self.admin_key):
            raise ApiError(401, "this needs the administrator's key.", code="invalid_api_key")
        if self._control is None:
            raise ApiError(404, "this server has no control verbs: its run controls it.")
        return json_response(await self._control.command(request.match_info["verb"]))


@asynccontextmanager
async def serving(server: SessionServer, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Runs a server inside the block, and yields its address."""
    url = await server.start(host, port)
    try:
        yield url
    finally:
        await server.close()


def _read_key(request: "web.Request") -> str:
    # The name of a scheme has no case in HTTP: some clients send "bearer".
    given = request.headers.get("Authorization", "").strip()
    key = given[len("Bearer ") :].strip() if given.lower().startswith("bearer ") else given
    return key or request.headers.get("x-api-key", "")


async def _on_thread(content: bytes, function: Callable[[], T]) -> T:
    """Calls a function that reads a body, on a thread if the body is long."""
    if len(content) < LONG_BODY:
        return function()
    return await asyncio.to_thread(function)


async def _show_health(request: "web.Request") -> "web.StreamResponse":
    del request
    return json_response({"status": "ok"})


def _make_error_response(dialect: Dialect | None, error: ApiError) -> "web.Response":
    content = dialect.error(error) if dialect else as_openai(error)
    return json_response(content, status=error.status, headers=error.headers)


def _model(name: str) -> dict[str, JSON]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "interlace"}


def _turn_number(request: "web.Request") -> int | None:
    given = request.headers.get("X-Turn")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise ApiError(400, f"the header X-Turn is {given[:20]!r}: it must be a turn's number, from 0 to 999999999.")
    return int(given)
