"""Clients that send the requests of a session to the engines."""

import asyncio
import math
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

from interlace.core.errors import EnginesBusyError
from interlace.core.types import Request, Response
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.pool import EnginePool, settle
from interlace.runtime.cluster import Cluster


class Asker(Protocol):
    """Client that sends the requests of a session to the engines."""

    def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Awaitable[Response]:
        """Returns the response to a request. The wait-for graph shows the two names meanwhile.

        on_draft: called with each draft of a request that streams. patience_s: seconds to wait while engines take new
        weights; EnginesBusyError afterwards.
        """
        ...


class FromPool:
    """Client for a sample that was admitted to the pool."""

    def __init__(self, cluster: Cluster, pool: EnginePool) -> None:
        self._cluster, self._pool = cluster, pool

    async def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        if patience_s < math.inf and (version := self._pool.weights.drains_for) is not None:
            try:
                await asyncio.wait_for(self._pool.swapped(version, who=who), patience_s)
            except TimeoutError:
                why = f"engines finish their sequences before they take version {version} of the weights; try again."
                raise EnginesBusyError(why) from None
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pool.ask(request, partial(settle, future), on_draft)
        try:
            return await self._cluster.waits.wait_for(future, who=who, what=what)
        except asyncio.CancelledError:
            self._pool.withdraw(request.id)
            raise
