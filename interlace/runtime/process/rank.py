"""The controller's end of a connection to a worker: its calls without a reply, and the offset of its clock."""

import asyncio
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import InterlaceError, WorkerDiedError
from interlace.core.payload import Dumps, remove_orphans
from interlace.runtime.process.frames import CONSTRUCTION, LAST, UNAWAITED, Assembler, Call, Reply, encode, plain_dumps
from interlace.runtime.process.shared import SharedArrays
from interlace.runtime.rank import RankResult
from interlace.runtime.waits import Clock
from interlace.runtime.worker import WorkerContext

_CHUNK = 1 << 20
GRACE_S = 5.0
"""Seconds for a running operation to end, and for the process's watcher to report the cause of a death."""


class RankConnection(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection. It writes frames and assembles the replies."""

    def __init__(
        self,
        shared: SharedArrays | None,
        *,
        on_reply: Callable[[Reply], None],
        on_unreadable: Callable[[Exception], None],
        on_lost: Callable[[], None],
    ) -> None:
        """on_unreadable: receives the error of a reply that cannot be unpickled. on_lost: called at the end."""
        self.transport: asyncio.Transport | None = None
        """None until the connection may carry calls."""
        self._assembler = Assembler(shared)
        self._on_reply, self._on_unreadable, self._on_lost = on_reply, on_unreadable, on_lost

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends the parts of a frame. Does nothing before the connection is made."""
        if self.transport:
            for part in parts:
                self.transport.write(part)

    def close(self) -> None:
        """Closes the connection after the sent bytes have left."""
        if self.transport:
            self.transport.close()

    def abort(self) -> None:
        if self.transport:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the message header determines the size
        """Returns the memory into which the transport writes received bytes."""
        return self._assembler.space[:_CHUNK]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles `nbytes` that the transport received; called by asyncio."""
        try:
            messages = self._assembler.received(nbytes)
        except Exception as error:  # noqa: BLE001 - unpickling a user's value can raise anything
            self._on_unreadable(error)
            return
        for message in messages:
            if isinstance(message, Reply):
                self._on_reply(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the process's watcher has the cause
        """Handles the end of the connection; called by asyncio."""
        self._on_lost()


class ProcessRank(ABC):
    """Sends calls and receives replies.

    The death of its process fails the open calls, and all later ones, with an error that names the open calls.
    """

    def __init__(
        self,
        context: WorkerContext,
        clock: Clock,
        shared: SharedArrays | None,
        on_failure: Callable[[Exception], None],
        *,
        dumps: Dumps = plain_dumps,
    ) -> None:
        """on_failure: called with failures that no caller waits for, in particular the death of the process."""
        self._context, self._on_failure = context, on_failure
        self._shared, self._dumps = shared, dumps
        self._process_number: int | None = None
        """Number of the rank's process. None before its start."""
        self.process_here: int | None = None
        """The same while the process may be killed from here: it is on this machine, and neither dead nor ended."""
        self.was_stopped = False
        """True if the process was killed because a signal had stopped it."""
        self.open_calls = OpenCalls(clock)
        self._connection = RankConnection(
            shared, on_reply=self._handle_reply, on_unreadable=self._fail_unreadable, on_lost=self._handle_loss
        )
        self._sending = asyncio.Lock()
        self._closing = self._closed = False
        self._dead: InterlaceError | None = None
        self._inquest: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Name of the rank, for messages."""
        return f"{self._context.group}[rank {self._context.rank}]"

    @property
    def is_open(self) -> bool:
        """True while the rank's process exists."""
        return not self._closed

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        async with self._sending:
            _check_open(self)
            call = Call(number=self.open_calls.next_number, method=method, args=args, kwargs=kwargs)
            parts = await self._prepare_call(call)
            _check_open(self)
            answer = self.open_calls.add(method, (args, kwargs))
            self._connection.write(parts)
        reply = await answer
        return RankResult(reply.value, *(self.open_calls.clock_offset.here(there_s) for there_s in reply.ran_s))

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        self._connection.write(self._encode_call(Call(number=UNAWAITED, method=method, args=args)))

    async def death(self) -> WorkerDiedError | None:
        """Returns the cause if the rank's process died. Returns None if this side ended it."""
        if self._inquest:
            await self._inquest
        return self._dead if isinstance(self._dead, WorkerDiedError) else None

    async def close(self) -> None:
        """Waits a few seconds for the running operation to end, and then ends the process. Open calls fail at once."""
        if self._closed:
            return
        self._closed = self._closing = True
        self.process_here = None
        self.open_calls.fail_all(WorkerDiedError(f"{self.name} was ended while {self.open_calls.describe()}."))
        self._connection.write(encode(Call(number=LAST, method="close")))
        self._connection.close()
        await self._end()
        if self._shared:
            remove_orphans(self._shared.folder, self._process_number)

    @abstractmethod
    async def _end(self) -> None:
        """Ends the process, if it does not end by itself. Its connection is already closed."""

    @abstractmethod
    async def _cause_of_death(self) -> str:
        """Returns the identity of the process and the cause of its death, as far as it is known within GRACE_S."""

    async def _prepare_call(self, call: Call) -> list[bytes | memoryview]:
        """Returns the parts of a call's message, after everything that must arrive before it."""
        return self._encode_call(call, self._shared)

    def _encode_call(self, call: Call, shared: SharedArrays | None = None) -> list[bytes | memoryview]:
        try:
            return encode(call, shared, self._dumps)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InterlaceError(
                f"{self.name}.{call.method}(): an argument cannot be sent to another process: {error}. Pass data, "
                "not open files, locks, tasks or functions that hold such things."
            ) from error

    def _fail_unreadable(self, error: Exception) -> None:
        """Closes the connection: a reply was lost, and all later ones with it."""
        lost = InterlaceError(
            f"{self.name}: a reply cannot be read here ({type(error).__name__}: {error}), "
            f"{self.open_calls.describe()}. Return data whose classes can be imported and made here."
        )
        lost.__cause__ = error
        self._closing = True
        self._fail_connection(lost)
        self._connection.abort()

    def _handle_reply(self, reply: Reply) -> None:
        self.open_calls.update_clock_offset(reply)
        if reply.number == UNAWAITED and reply.error:
            self._on_failure(reply.error)
        elif self.open_calls.resolve(reply) and reply.error:
            # A worker that could not be constructed hangs up; this is not a death.
            self._closing |= reply.number == CONSTRUCTION

    def _handle_loss(self) -> None:
        """Handles the end of the connection: the process died, or this end closed."""
        self.process_here = None
        if not self._closing:
            self._inquest = self._start_task(self._explain_death())

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _explain_death(self) -> None:
        doing = self.open_calls.describe()
        cause = await self._cause_of_death()
        if self._shared:
            remove_orphans(self._shared.folder, self._process_number)
        if self._closing:
            return
        ended = "was killed, because a signal had stopped it," if self.was_stopped else "died"
        self._fail_connection(WorkerDiedError(f"{self.name} {ended} while {doing} {cause}"))

    def _fail_connection(self, error: InterlaceError) -> None:
        self._dead = error
        self.open_calls.fail_all(error)
        self._on_failure(error)


def _check_open(rank: ProcessRank) -> None:
    """Raises an error if no reply of a rank can come any more."""
    if rank._dead:
        raise rank._dead
    if rank._closed:
        raise WorkerDiedError(f"{rank.name} was ended.")


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
