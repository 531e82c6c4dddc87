"""Ends a run that cannot go on with an error that names who waits for what, instead of hanging."""

from collections.abc import Callable

from interlace.core.errors import HangError
from interlace.runtime.clock import Clock
from interlace.runtime.waits import WaitRegistry


class Watchdog:
    """Sees a stall: no operation runs and nothing ended since the last look.

    A stall first asks those registered, in order, to move something (resume what is suspended, flush a partial
    granule). If nobody can, it is a bug and the run ends. So does an operation that runs on for too long.
    """

    LOOK_EVERY_S = 0.25

    def __init__(self, clock: Clock, waits: WaitRegistry, *, hang_after_s: float) -> None:
        self._clock, self._waits, self.hang_after_s = clock, waits, hang_after_s
        self._resolvers: list[Callable[[], bool]] = []
        self.num_stalls = 0

    def on_stall(self, resolver: Callable[[], bool]) -> None:
        """Registers somebody who may move something at a stall; True where it did."""
        self._resolvers.append(resolver)

    def resolve_or_raise(self) -> bool:
        """At a stall: asks the resolvers in order until one moved something. HangError where none did."""
        if not self._resolved():
            raise HangError(f"nothing can go on; this is a bug.\n{self._waits.graph()}")
        return True

    def at_rest(self) -> None:
        """The controller has done all that there was to do: where no operation is out, that is a stall, or the end."""
        if self._waits.num_running == 0:
            self._resolved()

    def _resolved(self) -> bool:
        found = any(resolver() for resolver in self._resolvers)
        self.num_stalls += found
        return found

    async def run(self) -> None:
        """Looks now and then, for what at_rest() was not told of, for ever. Raises HangError."""
        seen, since, quiet_looks = -1, self._clock.now(), 0
        while True:
            await self._clock.sleep(self.LOOK_EVERY_S)
            if self._waits.progress != seen:
                seen, since, quiet_looks = self._waits.progress, self._clock.now(), 0
                continue
            if self._waits.num_running == 0:
                quiet_looks += 1
            # Two looks in a row, since a look can fall between the end of a wait and the next operation's start.
            if quiet_looks >= 2:
                self.resolve_or_raise()
            if self._clock.now() - since > self.hang_after_s:
                raise HangError(
                    f"no progress for {self.hang_after_s:.0f} s (cluster.hang_after_s).\n{self._waits.graph()}"
                )
