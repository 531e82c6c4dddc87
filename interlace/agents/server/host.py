"""Server of the sessions of one process. It runs while a session is open."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlace.agents.server.app import SessionAddress, SessionServer
from interlace.agents.server.conversation import Conversation
from interlace.rollouts.base import Session

HOST = "127.0.0.1"
PATIENCE_S = 30.0
"""Seconds that a request waits for new weights. Clients retry only a few times, so the server waits first."""


class SessionHost:
    """Server of sessions for programs, which need only an address and a key. All open sessions share one server."""

    def __init__(self) -> None:
        self._server: SessionServer | None = None
        self._num_open = 0
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serve(
        self, session: Session, *, keeps_distribution: bool = True, patience_s: float = PATIENCE_S
    ) -> AsyncIterator[tuple[Conversation, SessionAddress]]:
        """Serves a session inside the block; afterwards its key is invalid. keeps_distribution, patience_s: see
        Conversation.
        """
        self._num_open += 1
        try:
            async with self._starting:
                if self._server is None:
                    server = SessionServer()
                    await server.start(HOST)
                    _bypass_proxies(HOST)
                    self._server = server
            server = self._server
            conversation, endpoint = server.open(session, keeps_distribution=keeps_distribution, patience_s=patience_s)
            try:
                yield conversation, endpoint
            finally:
                await server.forget(conversation)
        finally:
            self._num_open -= 1
            if not self._num_open and self._server:
                last, self._server = self._server, None
                await last.close()


def _bypass_proxies(host: str) -> None:
    """Exempts a host from the proxies of this process and of its programs.

    HTTP clients send requests to their own machine to a proxy too, which cannot reach the server.
    """
    names = {name.lower(): value for name, value in os.environ.items() if name.lower().endswith("_proxy") and value}
    if not names.keys() - {"no_proxy"}:  # a variable alone would hide the system's proxies
        return
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        given = os.environ.get(name) or os.environ.get(other) or ""
        hosts = [each.strip() for each in given.split(",") if each.strip()]
        os.environ[name] = given if "*" in hosts or host in hosts else ",".join([*hosts, host])
