"""Order of results: they reach the controller one at a time, so that its actions depend only on their order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence


class ResultOrder:
    """Queue that passes on one result at a time, the next once all reactions to the previous one have finished.

    Otherwise the handling of results that arrive almost together would be interleaved at random, and their order would
    not determine the controller's actions. The end of all reactions also reveals a stall: nothing is left that could
    continue.
    """

    MAX_TURNS = 1000
    """Turns of the event loop after which the next result passes anyway, because a task may be busy forever."""

    def __init__(self, on_rest: Callable[[], None] = lambda: None) -> None:
        """Makes a queue on a running event loop. on_rest: called once no result waits and all reactions are done."""
        self._loop, self._on_rest = asyncio.get_running_loop(), on_rest
        # The ready callbacks of the loop; asyncio has no public interface for them. If a loop stores them elsewhere,
        # its rest cannot be observed, and a result then waits for only one turn.
        self._ready: Sequence[object] | None = getattr(self._loop, "_ready", None)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_turns, self._is_looking = 0, False

    async def wait_turn(self) -> None:
        """Returns when the caller's result may pass: first come, first served."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._pass_next_result)
        await turn

    def _pass_next_result(self) -> None:
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
        self._loop.call_soon(self._pass_next_result)
