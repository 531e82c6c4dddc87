"""Evacuation of a rollout engine: its running jobs move to other engines as partials."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from interlace.rollouts.engine_calls import EngineCalls
from interlace.rollouts.engine_jobs import EngineJobs

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver


class Evacuation:
    """Moves the running jobs of one engine to others, which do not swap weights until the jobs have arrived.

    Consumes: requests to empty the engine (`begin`).
    Produces: partials, dispatched to the given engines (`move`).
    Waits for: the end of the engine's current call.
    Released by: the abort of the engine's sequences, or the loss of the engine (`end`).
    """

    def __init__(self, jobs: EngineJobs, calls: EngineCalls, wake: Callable[[], None]) -> None:
        """wake: called when the engine has to act."""
        self._jobs, self._calls, self._wake = jobs, calls, wake
        self._onto: list[EngineDriver] | None = None
        """Engines to which the running jobs will move; None if they stay."""
        self._num_awaited = 0

    @property
    def is_due(self) -> bool:
        """True if the running jobs will move to other engines."""
        return self._onto is not None

    @property
    def num_awaited(self) -> int:
        """Number of engines whose running jobs will move here and continue under this engine's current weights."""
        return self._num_awaited

    def begin(self, onto: "list[EngineDriver]") -> None:
        """Requests that all running jobs move to the given engines. Does nothing if none runs or they move already."""
        if not self._jobs.running or self._onto is not None:
            return
        self._onto = onto
        for driver in onto:
            driver.evacuation._num_awaited += 1
        self._wake()

    async def move(self) -> None:
        """Moves the running jobs if this was requested."""
        if self._onto is not None:
            await self._calls.abort_all("migrated", self._onto)
            self.end()

    def end(self) -> None:
        """Ends the evacuation: the other engines wait for no more jobs of this one."""
        onto, self._onto = self._onto or [], None
        for driver in onto:
            driver.evacuation._num_awaited -= 1
            driver.evacuation._wake()
