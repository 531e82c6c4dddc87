"""Work outside the workers, such as writing a file or waiting for a person's demonstrations."""

import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from interlace.runtime.rank import Services
from interlace.runtime.timeline import Span


class OutsideWork:
    """Registers work outside the workers as waits, and records it as spans. Orders its ends like results."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, who: str, what: str, work: Coroutine[Any, Any, object]) -> None:
        """Runs the work as a recorded span. who, what: group and operation of the span."""
        timeline, clock = self._services.timeline, self._services.clock
        start_s, end_s = clock.now(), math.inf
        span = Span(
            start_s=start_s,
            devices=(),
            group=who,
            rank=0,
            operation=what,
            cause=what,
            step=timeline.step,
            version=timeline.version,
        )
        timeline.begin(span)
        try:
            async with self.wait(who, what):
                await work
                end_s = clock.now()
        finally:
            now_s = clock.now()
            timeline.end(span, start_s, min(end_s, now_s))

    @asynccontextmanager
    async def wait(self, who: str, what: str) -> AsyncIterator[None]:
        """Registers a wait. Then waits for this result's turn (see ResultOrder)."""
        with self._services.waits.operation(who=who, what=what):
            yield
            await self._services.wait_turn()
