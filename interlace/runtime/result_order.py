"""Results reach the controller one at a time, so that what it does follows from their order alone."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from interlace.runtime.group import Rank, RankResult


class ResultOrder:
    """Queue that lets one result through at a time: the next once all that the last one set off has come to rest.

    Results that come at nearly one moment would otherwise be worked on in turns, mixed as it happens, and the order in
    which they came would not say what the controller did. Rest also shows a stall: nothing is left that could go on.
    """

    MAX_TURNS = 1000
    """Turns of the event loop after which a result goes through all the same: a task may be busy for good."""

    def __init__(self, on_rest: Callable[[], None] = lambda: None) -> None:
        """Made on a running event loop. on_rest: called once results have passed and all they set off is at rest."""
        self._loop, self._on_rest = asyncio.get_running_loop(), on_rest
        # The callbacks that are ready. asyncio does not say otherwise whether there are any; of a loop that keeps them
        # elsewhere it is unknown whether it rests, and a result then waits for one turn only.
        self._ready: Sequence[object] | None = getattr(self._loop, "_ready", None)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_turns, self._is_looking = 0, False

    async def wait_turn(self) -> None:
        """Returns when it is one's turn: first come, first served."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)
        await turn

    def _look(self) -> None:
        self._num_turns += 1
        if not self._ready or self._num_turns > self.MAX_TURNS:
            self._num_turns = 0
            if not self._waiting:
                self._is_looking = False
                if self._ready is not None and not self._ready:
                    self._on_rest()
                return
            turn = self._waiting.popleft()
            if not turn.done():  # the waiting task may be gone
                turn.set_result(None)
        self._loop.call_soon(self._look)


class OrderedRank:
    """A rank whose results pass a result_order."""

    def __init__(self, rank: Rank, result_order: ResultOrder) -> None:
        """result_order: the run's."""
        self._rank, self._result_order = rank, result_order

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        """Calls the rank; the result waits for its turn. An error does not wait: the run ends with it."""
        ran = await self._rank.call(method, args, kwargs)
        await self._result_order.wait_turn()
        return ran

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Calls the rank at once."""
        self._rank.call_now(method, args)

    async def close(self) -> None:
        """Ends the worker."""
        await self._rank.close()
