"""Sessions of a server by their keys: each request is answered once, and each session ends once."""

import asyncio
import contextlib
import hashlib
import itertools
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Protocol, TypeAlias

from interlace.agents.server.ask import Answers, Ask, make_shown_message, merge_params
from interlace.agents.server.body import ApiError, as_api_error
from interlace.agents.shown_messages import ShownMessages
from interlace.core.messages import Message
from interlace.core.tasks import cancel_tasks
from interlace.rollouts.base import Context, Session, Turn, TurnDraft, TurnOptions
from interlace.runtime.http_listener import is_same_key

_KEPT_ANSWERS = 256
"""Number of answers kept for retries."""


OnDraft: TypeAlias = Callable[[int, TurnDraft], None]
"""Receiver of drafts, each with the index of its answer."""


class Asked:
    """A request and the task that answers it, shared by all clients that wait for the answer."""

    def __init__(self, digest: str, head: Answers, make: Callable[[Answers, OnDraft], Awaitable[Answers]]) -> None:
        self.digest, self.head, self.num_waiting = digest, head, 0
        self._drafts: dict[int, TurnDraft] = {}
        self._listeners: list[asyncio.Event] = []
        self.task = asyncio.ensure_future(make(head, self._receive_draft))
        self.task.add_done_callback(lambda _: self._notify_listeners())

    async def answer(self) -> Answers:
        """Waits for the answers. A cancellation does not affect other waiting clients."""
        return await asyncio.shield(self.task)

    async def drafts(self) -> AsyncGenerator[tuple[int, TurnDraft], None]:
        """Yields the newest draft of each answer, with its index, until the answers are complete."""
        news, seen = asyncio.Event(), dict[int, TurnDraft]()
        self._listeners.append(news)
        while not self.task.done():
            news.clear()
            new = {place: draft for place, draft in self._drafts.items() if seen.get(place) is not draft}
            seen |= new
            for place, draft in new.items():
                yield place, draft
            await news.wait()

    def _receive_draft(self, place: int, draft: TurnDraft) -> None:
        self._drafts[place] = draft
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener.set()


class Retries:
    """Requests of one client. A request that is repeated after a time-out gets the answer of the first."""

    def __init__(self) -> None:
        self._asked: dict[str, Asked] = {}
        self._numbers = itertools.count()
        self._refused = Counter[str]()
        """Numbers of requests without a name that ended with an error which clients answer by a retry, by digest."""
        self.num_retries = 0

    @contextmanager
    def begin_once(
        self, name: str | None, digest: str, begin: Callable[[], Asked], *, is_first: bool = False
    ) -> Iterator[Asked]:
        """Begins a request, or returns the same request if it was begun before.

        name: the client's name of the request. Without a name, a request with the same body in flight is the same
        request, unless is_first: the client states that it has not sent this request before. A retry of a request that
        ended with an error is a new request too: several clients may repeat equal requests at once. If the block ends
        before the answer, the request is withdrawn, unless another client waits for it.
        """
        key = name or f"body {digest}"
        if name is None and (is_first or self._take_refused(digest)) and key in self._asked:
            key = f"{key} {next(self._numbers)}"
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = begin()
            self._forget_old()
        elif asked.digest != digest:
            what = f"Idempotency-Key {key!r} was given with another body, X-Turn, X-Session-ID or route before."
            raise ApiError(400, what, code="idempotency_key")
        else:
            self.num_retries += 1
        asked.num_waiting += 1
        try:
            yield asked
        finally:
            asked.num_waiting -= 1
            self._forget_request(key, asked, is_named=name is not None)

    def _forget_request(self, key: str, asked: Asked, *, is_named: bool) -> None:
        task = asked.task
        if not task.done() and not asked.num_waiting:
            task.cancel()
        error = task.exception() if task.done() and not task.cancelled() else None
        if (
            not is_named
            and isinstance(error, Exception)
            and as_api_error(error).status >= HTTPStatus.INTERNAL_SERVER_ERROR
        ):
            self._refused[asked.digest] += 1
            for digest in list(self._refused)[:-_KEPT_ANSWERS]:
                del self._refused[digest]
        is_kept = is_named and task.done() and not task.cancelled() and error is None
        if not is_kept and not asked.num_waiting and self._asked.get(key) is asked:
            del self._asked[key]

    def _take_refused(self, digest: str) -> bool:
        """Returns whether an equal request ended with an error and was not repeated yet, and counts its repetition."""
        if not self._refused[digest]:
            del self._refused[digest]
            return False
        self._refused[digest] -= 1
        return True

    def _forget_old(self) -> None:
        done = [key for key, asked in self._asked.items() if asked.task.done()]
        for key in done[: max(0, len(done) - _KEPT_ANSWERS)]:
            del self._asked[key]

    @property
    def in_flight(self) -> list[asyncio.Future[Answers]]:
        return [asked.task for asked in self._asked.values() if not asked.task.done()]

    async def close(self) -> None:
        await cancel_tasks(self.in_flight)


def digest_of(path: str, body: bytes, number: int | None, agent: str = "") -> str:
    """Returns a hash of a request: its route, its body, and the number of its turn and its agent if they are given."""
    return hashlib.sha256(f"{path}\0{number}\0{agent}\0".encode("utf-8", "surrogateescape") + body).hexdigest()


@dataclass(slots=True, eq=False)
class Conversation:
    """An open session, and the messages that its client received."""

    session: Session
    keeps_distribution: bool
    """True if the run's distribution applies and a client's temperature is ignored."""
    patience_s: float = math.inf
    """Seconds that a request waits while engines drain for new weights, before it gets 503."""
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    reward: float | None = None
    """Reward that the client set; the last one counts."""
    ended: bool = False
    retries: Retries = field(default_factory=Retries)
    num_turns: int = 0
    turns_by_agent: dict[str, list[Turn]] = field(default_factory=dict)
    """Turns by the agent that their requests name; "" for none."""
    visit: AsyncExitStack | None = None
    """Resources of an open session that a client opened."""
    used_s: float = field(default_factory=time.monotonic)
    """Time of the start or the end of the last request, by time.monotonic()."""
    _shown: ShownMessages = field(default_factory=ShownMessages)

    async def answer(self, head: Answers, on_draft: OnDraft, *, number: int | None = None) -> Answers:
        """Samples the answers to a request. number: number of the first turn. Raises ApiError if it has ended."""
        self.check_open()
        ask = head.ask
        contexts = [each for each in (self._find_context(ask), *ask.other_contexts) for _ in range(ask.num_answers)]
        params = merge_params(self.session.params, ask, keeps_distribution=self.keeps_distribution)
        drawn = [
            asyncio.ensure_future(
                self.session.generate(
                    context,
                    tools=ask.tools,
                    params=params,
                    number=None if number is None else number + place,
                    options=TurnOptions(
                        on_draft=partial(on_draft, place) if ask.stream else None,
                        patience_s=self.patience_s,
                        chat_template_kwargs=ask.chat_template_kwargs,
                    ),
                )
            )
            for place, context in enumerate(contexts)
        ]
        try:
            turns = await asyncio.gather(*drawn)
        except BaseException as error:
            self._withdraw_answers(drawn)
            if self.ended and isinstance(error, asyncio.CancelledError):
                raise ApiError(409, "the session has ended.", code="session_ended") from None
            raise
        finally:
            self.used_s = time.monotonic()
        self.num_turns += len(turns)
        for turn in turns:
            self._shown.add(make_shown_message(turn, ask), turn.message)
        return replace(head, turns=turns)

    def _withdraw_answers(self, drawn: Sequence[asyncio.Future[Turn]]) -> None:
        """Withdraws the answers to a request that failed as a whole, so that no answer is trained without a client."""
        for task in drawn:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                self.session.withdraw(task.result())

    def _find_context(self, ask: Ask) -> Context:
        """Returns the context of a request with its earlier answers as the model sampled them."""
        messages = self._shown.find_sampled([each for each in ask.context if isinstance(each, Message)])
        return messages or ask.context

    def is_idle(self, limit_s: float) -> bool:
        """Returns whether no request has been answered for `limit_s` seconds, and none is in flight."""
        return time.monotonic() - self.used_s >= limit_s and not self.retries.in_flight

    def check_open(self) -> None:
        """Raises ApiError if the session has ended."""
        if self.ended:
            raise ApiError(409, "the session has ended: it takes no more requests.", code="session_ended")

    async def count_tokens(self, ask: Ask) -> int:
        """Returns the number of tokens of a request's context. Raises ApiError if the session has ended."""
        self.check_open()
        return await self.session.count_tokens(self._find_context(ask), tools=ask.tools)

    def set_reward(self, value: float | None) -> None:
        """Records the reward that a client sets. Raises ApiError if it is missing."""
        self.check_open()
        if value is None:
            raise ApiError(400, "reward is missing: it must be a finite number.", param="reward")
        self.reward = value

    async def end(self) -> None:
        """Ends the session; requests in flight are withdrawn."""
        self.ended = True
        await self.retries.close()


KEPT_SESSIONS = 1024
"""Number of ended sessions of clients whose keys are still known."""


class Visitors(Protocol):
    """Source of sessions for clients with the server's key."""

    def session(self, seed: int | None) -> contextlib.AbstractAsyncContextManager[Session]:
        """Opens a session. seed: seed of its sampling noise; None generates one."""

    def busy_s(self) -> float | None:
        """Returns the seconds after which a client may try again, while no request is taken; else None."""


class Sessions:
    """The sessions whose keys a server accepts: opened by this process, or by clients with the server's key."""

    def __init__(self, api_key: str, visitors: Visitors | None) -> None:
        """api_key: the server's key. visitors: if None, only sessions opened by this process are served."""
        self._api_key, self._visitors = api_key, visitors
        self._open: dict[str, Conversation] = {}
        """Sessions by key. An ended session stays until its owner removes it, or, if a client opened it, until
        KEPT_SESSIONS later ones have ended."""
        self._ended: deque[str] = deque()
        """Keys of ended sessions of clients, oldest first."""

    def add(self, conversation: Conversation) -> None:
        self._open[conversation.key] = conversation

    def remove(self, conversation: Conversation) -> bool:
        """Removes the key of a session. Returns False if it was not known."""
        return self._open.pop(conversation.key, None) is not None

    def take_visit(self, conversation: Conversation) -> contextlib.AsyncExitStack | None:
        """Returns and removes the resources of a client's session that has ended. None if this process opened it."""
        visit, conversation.visit = conversation.visit, None
        if visit:
            self._ended.append(conversation.key)
            if len(self._ended) > KEPT_SESSIONS:
                del self._open[self._ended.popleft()]
        return visit

    def list_idle(self, limit_s: float) -> list[Conversation]:
        """Lists the sessions of clients without a request for `limit_s` seconds."""
        return [each for each in self._open.values() if each.visit and each.is_idle(limit_s)]

    def find(self, key: str) -> Conversation | None:
        """Returns the session of a request's key; None for the server's own key. Raises ApiError for a wrong key."""
        if conversation := self._open.get(key):
            conversation.used_s = time.monotonic()
            return conversation
        if self._visitors is None or not is_same_key(key, self._api_key):
            fault = "the key is wrong" if key else "the request has no key"
            hint = "send it as `Authorization: Bearer KEY`, or as `x-api-key`"
            raise ApiError(401, f"{fault}: {hint}.", code="invalid_api_key")
        return None

    def require(self, key: str) -> Conversation:
        """Returns the session of a request's key. Raises ApiError for any other key."""
        if conversation := self.find(key):
            return conversation
        raise ApiError(400, "this is for a session: send the key of one, from POST /v1/sessions.")

    def admit_client(self) -> Visitors:
        """Returns the source of sessions for a client. Raises ApiError if it may not have one now."""
        if self._visitors is None:
            raise ApiError(401, "this server has only the sessions of its run.", code="invalid_api_key")
        if (busy_s := self._visitors.busy_s()) is not None:
            raise ApiError(503, "no request is taken while weights change; try again.", retry_after_s=busy_s)
        return self._visitors

    async def end_conversations(self) -> None:
        """Ends all sessions, without their resources."""
        for conversation in [*self._open.values()]:
            await conversation.end()

    async def close(self) -> None:
        """Frees the resources of the sessions of clients."""
        for visit in [each.visit for each in self._open.values() if each.visit]:
            await visit.aclose()
