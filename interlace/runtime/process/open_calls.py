"""Calls on a rank that have no reply yet, and the offset of its clock from the run's clock."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import InterlaceError
from interlace.runtime.clock import Clock
from interlace.runtime.process.frames import CONSTRUCTION, Reply

DRIFT = 50e-6
"""Largest relative drift between two clocks, in seconds per second: more than ordinary crystals have."""


class ClockOffset:
    """Bounds of (remote clock - local clock), from exchanged messages.

    Remote work cannot begin before its message was sent, nor end after its reply was received. Each exchange thus
    bounds the difference from both sides, as in Cristian's algorithm and NTP (RFC 5905). The bounds of several
    exchanges are intersected, after the older bounds are widened by the possible drift since then.
    """

    def __init__(self) -> None:
        self._low_s, self._high_s, self._known_s = -math.inf, math.inf, 0.0

    def add_exchange(self, *, sent_s: float, start_there_s: float, end_there_s: float, received_s: float) -> None:
        """Narrows the bounds by one exchange: sent, executed remotely from start to end, and its reply received."""
        drift_s = DRIFT * max(0.0, received_s - self._known_s)
        during_s = DRIFT * (received_s - sent_s)
        low_s, high_s = end_there_s - received_s - during_s, start_there_s - sent_s + during_s
        known_low_s, known_high_s = self._low_s - drift_s, self._high_s + drift_s
        if known_low_s <= high_s and low_s <= known_high_s:
            self._low_s, self._high_s = max(low_s, known_low_s), min(high_s, known_high_s)
        else:
            # A clock was set, or a machine slept: the earlier bounds no longer apply.
            self._low_s, self._high_s = low_s, high_s
        self._known_s = received_s

    @property
    def offset_s(self) -> float:
        """Returns the middle of the bounds. Valid after the first exchange."""
        return (self._low_s + self._high_s) / 2

    @property
    def error_s(self) -> float:
        """Returns the largest possible error of `offset_s`, in seconds."""
        return (self._high_s - self._low_s) / 2

    def here(self, there_s: float) -> float:
        """Converts a time of the other clock to this one."""
        return there_s - self.offset_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OpenCall:
    method: str
    since_s: float
    answer: "asyncio.Future[Reply]"
    given: tuple[Any, ...] = ()
    """Arguments, kept until the reply even if nothing waits for it, because the message only names shared arrays."""


class OpenCalls:
    """The calls on one rank, by number, from the message to its reply."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[int, _OpenCall] = {}
        self.next_number = CONSTRUCTION
        """Number of the next call."""
        self.clock_offset = ClockOffset()
        """Offset between the rank's clock and the run's clock, from the replies so far."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, method: str, given: tuple[Any, ...] = ()) -> "asyncio.Future[Reply]":
        """Adds a call with the next number. Returns the future of its reply."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[self.next_number] = _OpenCall(method=method, since_s=self._clock.now(), answer=answer, given=given)
        self.next_number += 1
        return answer

    def update_clock_offset(self, reply: Reply) -> None:
        """Narrows the clock offset by a reply that has just arrived."""
        call = self._calls.get(reply.number)
        if call and not reply.error:
            start_s, end_s = reply.ran_s
            self.clock_offset.add_exchange(
                sent_s=call.since_s, start_there_s=start_s, end_there_s=end_s, received_s=self._clock.now()
            )

    def resolve(self, reply: Reply) -> bool:
        """Removes the reply's call and passes the reply to its caller. Returns False if the caller is gone."""
        call = self._calls.pop(reply.number, None)
        if call is None or call.answer.done():
            return False
        if reply.error:
            call.answer.set_exception(reply.error)
        else:
            call.answer.set_result(reply)
        return True

    def fail_all(self, error: InterlaceError) -> None:
        """Fails all calls, because the connection delivers no more replies."""
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)
        self._calls.clear()

    def describe(self) -> str:
        """Returns the running operations and their durations as a clause, for messages."""
        now = self._clock.now()
        running = [f"{call.method}() since {now - call.since_s:.1f} s" for call in self._calls.values()]
        return f"it ran {', '.join(running)}" if running else "it was idle"
