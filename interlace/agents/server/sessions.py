"""Sessions of a server by their keys."""

import contextlib
import time
from collections import deque
from typing import Protocol

from interlace.agents.server.body import ApiError
from interlace.agents.server.conversation import Conversation
from interlace.rollouts.base import Session
from interlace.runtime.http_listener import is_same_key

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
        """Accepts the key of a session."""
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
