"""Ends a run that cannot continue with an error that lists all waits, instead of a hang."""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from interlace.core.errors import HangError, NoProgressError
from interlace.runtime.waits import Clock, WaitRegistry


class Watchdog:
    """A watch for stalls: no operation works, and none has ended since the last check.

    At a stall, the registered resolvers are called in order; each may make progress possible (resume suspended work,
    flush a partial granule). If none can, the stall is a bug and the run ends. An operation that runs for too long also
    ends it.
    """

    LOOK_EVERY_S = 0.25

    def __init__(self, clock: Clock, waits: WaitRegistry, *, hang_after_s: float) -> None:
        self._clock, self._waits, self.hang_after_s = clock, waits, hang_after_s
        self._resolvers: list[Callable[[], bool]] = []
        self.num_stalls = 0

    def on_stall(self, resolver: Callable[[], bool]) -> None:
        """Registers a resolver, called at a stall. It returns True if it made progress possible."""
        self._resolvers.append(resolver)

    def resolve_or_raise(self) -> bool:
        """Calls the resolvers in order until one makes progress possible. Raises HangError if none does."""
        if not self._resolved():
            self._raise_hang()
        return True

    def _raise_hang(self) -> NoReturn:
        raise HangError(f"nothing can go on; this is a bug.\n{self._waits.graph()}")

    def at_rest(self) -> None:
        """Called when the controller has finished all its work.

        If no operation works, this is a stall or the end of the run.
        """
        if self._waits.num_working == 0:
            self._resolved()

    def _resolved(self) -> bool:
        found = any(resolver() for resolver in self._resolvers)
        self.num_stalls += found
        return found

    async def run(self) -> None:
        """Checks periodically, forever, for stalls that at_rest() did not report.

        Raises HangError, or NoProgressError if no operation ended for `hang_after_s`.
        """
        seen, since, quiet_looks = -1, self._clock.now(), 0
        while True:
            await self._clock.sleep(self.LOOK_EVERY_S)
            if self._waits.progress != seen:
                seen, since, quiet_looks = self._waits.progress, self._clock.now(), 0
                continue
            quiet_looks = 0 if self._waits.num_working else quiet_looks + 1
            # Two checks in a row, since a check can fall between the end of a wait and the start of the next operation.
            if quiet_looks >= 2 and not self._resolved() and self._waits.num_running == 0:
                self._raise_hang()
            if self._clock.now() - since > self.hang_after_s:
                raise NoProgressError(
                    f"no progress for {self.hang_after_s:.0f} s (cluster.hang_after_s).\n{self._waits.graph()}"
                )


class LoopWatch:
    """A thread that checks whether the event loop is blocked, which code on the loop itself cannot do.

    If the loop was blocked for too long and then continues, the run ends in order, with the reason. If it does not
    continue, the process ends at once. Earlier checkpoints stay intact, because checkpoints are written atomically.
    """

    EXIT_CODE = 3
    """Exit status of a process whose event loop stayed blocked."""
    GRACE_S = 3.0
    _BEAT_S = 0.25

    def __init__(self, waits: WaitRegistry, *, limit_s: Callable[[], float], on_blocked: Callable[[Exception], None]):
        """limit_s: returns how long the loop may be blocked. on_blocked: called on the loop, if it continues."""
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
                f"the event loop has been blocked for {stood_s:.0f} s by\n{self._find_blocker()}{self._list_waits()}"
            )
            self._loop.call_soon_threadsafe(self._on_blocked, error)
            before_s = self._beat_s
            if self._ended.wait(self.GRACE_S) or self._beat_s != before_s:
                return
            sys.stderr.write(
                f"error: {error}\nIt could not be freed, so the process ends, with exit code {self.EXIT_CODE}. Do not "
                "block the event loop: await, or use a thread or a process. The newest checkpoint is intact.\n"
            )
            sys.stderr.flush()
            os._exit(self.EXIT_CODE)

    def _find_blocker(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        frames = traceback.extract_stack(frame) if frame else []
        # Frames below the loop's own are omitted.
        start = max((place + 1 for place, entry in enumerate(frames) if entry.name == "_run"), default=0)
        return "".join(traceback.format_list(frames[start:]))

    def _list_waits(self) -> str:
        try:
            return self._waits.graph()
        except RuntimeError:  # the loop continued and changed the registry
            return ""
