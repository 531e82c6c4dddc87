"""Ends a run that cannot go on with an error that names who waits for what, instead of hanging."""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from interlace.core.errors import HangError
from interlace.runtime.clock import Clock
from interlace.runtime.waits import WaitRegistry


class Watchdog:
    """A watch for stalls: no operation runs and nothing ended since the last look.

    A stall first asks those registered, in order, to move something (resume what is suspended, flush a partial
    granule). If none can, the stall is a bug and the run ends. So does an operation that runs on for too long.
    """

    LOOK_EVERY_S = 0.25

    def __init__(self, clock: Clock, waits: WaitRegistry, *, hang_after_s: float) -> None:
        self._clock, self._waits, self.hang_after_s = clock, waits, hang_after_s
        self._resolvers: list[Callable[[], bool]] = []
        self.num_stalls = 0

    def on_stall(self, resolver: Callable[[], bool]) -> None:
        """Registers a resolver, which may move something at a stall and returns True where it did."""
        self._resolvers.append(resolver)

    def resolve_or_raise(self) -> bool:
        """Asks the resolvers in order, at a stall, until one moved something. HangError where none did."""
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
        """Looks now and then, for ever, for stalls that at_rest() was not called for. Raises HangError."""
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


class LoopWatch:
    """A thread that sees whether the event loop turns, which nothing that lives on the loop can.

    A loop that was blocked for too long, and goes on, ends the run in order, with the reason. Where it does not go on,
    the process ends at once: what was saved so far is whole, for checkpoints appear whole or not at all.
    """

    EXIT_CODE = 3
    """Exit status of a process whose loop could not be freed."""
    GRACE_S = 3.0
    _BEAT_S = 0.25

    def __init__(self, waits: WaitRegistry, *, limit_s: Callable[[], float], on_blocked: Callable[[Exception], None]):
        """limit_s: how long the loop may stand still, asked now and then. on_blocked: called on it, if it goes on."""
        self._waits, self._limit_s, self._on_blocked = waits, limit_s, on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beat_s = time.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins to watch; called on the loop."""
        self._beat()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def end(self) -> None:
        """Watches no more."""
        self._ended.set()

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        if not self._ended.is_set():
            self._loop.call_later(self._BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(self._BEAT_S):
            stood_s = time.monotonic() - self._beat_s
            if stood_s <= self._limit_s():
                continue
            error = HangError(
                f"the event loop has been blocked for {stood_s:.0f} s by\n{self._blocker()}{self._graph()}"
            )
            self._loop.call_soon_threadsafe(self._on_blocked, error)
            before_s = self._beat_s
            if self._ended.wait(self.GRACE_S) or self._beat_s != before_s:
                return
            sys.stderr.write(
                f"error: {error}\nIt could not be freed, so the process ends, with exit code {self.EXIT_CODE}. Do not "
                "block there: await, or leave it to a thread or a process. The newest checkpoint is whole.\n"
            )
            sys.stderr.flush()
            os._exit(self.EXIT_CODE)

    def _blocker(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        frames = traceback.extract_stack(frame) if frame else []
        # What called the loop is of no interest.
        start = max((place + 1 for place, entry in enumerate(frames) if entry.name == "_run"), default=0)
        return "".join(traceback.format_list(frames[start:]))

    def _graph(self) -> str:
        try:
            return self._waits.graph()
        except RuntimeError:  # the loop went on, and changed what was read
            return ""
