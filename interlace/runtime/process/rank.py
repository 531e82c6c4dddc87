"""The controller's end of a connection to a worker."""

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import InterlaceError, WorkerDiedError
from interlace.runtime.clock import Clock
from interlace.runtime.clock_offset import ClockOffset
from interlace.runtime.group import RankResult
from interlace.runtime.process.frames import CONSTRUCTION, UNAWAITED, Assembler, Call, Dumps, Reply, encode, plain_dumps
from interlace.runtime.process.shared import SharedArrays
from interlace.runtime.worker import WorkerContext

GRACE_S = 5.0
"""Seconds for a running operation to end, and for the process's watcher to report the cause of a death."""
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Open:
    """A call that has no reply yet."""

    method: str
    since_s: float
    answer: "asyncio.Future[Reply]"
    given: tuple[Any, ...] = ()
    """Arguments, kept until the reply even if nothing waits for it, because the message only names shared arrays."""


class ProcessRank(asyncio.BufferedProtocol, ABC):
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
        self._context, self._clock, self._on_failure = context, clock, on_failure
        self._shared, self._dumps = shared, dumps
        self.clock_offset = ClockOffset()
        """Offset between the rank's clock and the run's clock."""
        self._assembler = Assembler(shared)
        self._open: dict[int, _Open] = {}
        self._next = CONSTRUCTION
        self._sending = asyncio.Lock()
        self._closing = self._closed = False
        self._dead: InterlaceError | None = None
        self._inquest: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None

    @property
    def name(self) -> str:
        """Name of the rank, for messages."""
        return f"{self._context.group}[rank {self._context.rank}]"

    @property
    def is_busy(self) -> bool:
        """True while the rank runs an operation that has no reply yet."""
        return bool(self._open)

    @property
    def is_open(self) -> bool:
        """True while the rank's process exists."""
        return not self._closed

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        """Runs an operation on the rank's process, after the operations called before."""
        async with self._sending:
            await self._before_call((*args, *kwargs.values()))
            if self._dead:
                raise self._dead
            if self._closed:
                raise WorkerDiedError(f"{self.name} was ended.")
            number = self._next
            call = Call(number=number, method=method, args=args, kwargs=kwargs)
            parts = self._encoded(call, self._shared)
            answer = self._expect(method, (args, kwargs))
            self._write(parts)
        reply = await answer
        return RankResult(reply.value, *(self.clock_offset.here(there_s) for there_s in reply.ran_s))

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs an operation concurrently with the running one, and before all later calls."""
        self._write(self._encoded(Call(number=UNAWAITED, method=method, args=args)))

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
        self._fail_calls(WorkerDiedError(f"{self.name} was ended while {self._doing()}."))
        if self._transport:
            self._transport.close()
        await self._end()

    @abstractmethod
    async def _end(self) -> None:
        """Ends the process, if it does not end by itself. Its connection is already closed."""

    @abstractmethod
    async def _cause_of_death(self) -> str:
        """Returns the identity of the process and the cause of its death, as far as it is known within GRACE_S."""

    async def _before_call(self, values: Sequence[Any]) -> None:
        """Waits until a call with these arguments can be sent."""

    async def _before_result(self, value: Any) -> None:
        """Waits until a result is complete."""

    def _expect(self, method: str, given: tuple[Any, ...] = ()) -> "asyncio.Future[Reply]":
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[self._next] = _Open(method=method, since_s=self._clock.now(), answer=answer, given=given)
        self._next += 1
        return answer

    def _encoded(self, call: Call, shared: SharedArrays | None = None) -> list[bytes | memoryview]:
        try:
            return encode(call, shared, self._dumps)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InterlaceError(
                f"{self.name}.{call.method}(): an argument cannot be sent to another process: {error}. Pass data, "
                "not open files, locks, tasks or functions that hold such things."
            ) from error

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._transport:
            for part in parts:
                self._transport.write(part)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the message header determines the size
        """Returns the memory into which the transport writes received bytes."""
        return self._assembler.space[:_CHUNK]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles `nbytes` that the transport received; called by asyncio."""
        try:
            messages = self._assembler.received(nbytes)
        except Exception as error:  # noqa: BLE001 - unpickling a user's value can raise anything
            self._unreadable(error)
            return
        for message in messages:
            if isinstance(message, Reply):
                self._replied(message)

    def _unreadable(self, error: Exception) -> None:
        """Closes the connection: a reply was lost, and all later ones with it."""
        lost = InterlaceError(
            f"{self.name}: a reply cannot be read here ({type(error).__name__}: {error}), {self._doing()}. Return data "
            "whose classes can be imported and made here."
        )
        lost.__cause__ = error
        self._closing = True
        self._break(lost)
        if self._transport:
            self._transport.abort()

    def _replied(self, message: Reply) -> None:
        self._set_clock(message)
        if message.number == UNAWAITED and message.error:
            self._on_failure(message.error)
        elif self._is_waited_for(message.value):
            self._start(self._resolve_later(message))
        else:
            self._resolve(message)

    def _set_clock(self, reply: Reply) -> None:
        entry = self._open.get(reply.number)
        if entry and not reply.error:
            start_s, end_s = reply.ran_s
            self.clock_offset.exchanged(
                sent_s=entry.since_s, start_there_s=start_s, end_there_s=end_s, received_s=self._clock.now()
            )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the process's watcher has the cause
        """Handles the end of the connection: the process died, or this end closed."""
        if not self._closing:
            self._inquest = self._start(self._explain_death())

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_waited_for(self, value: Any) -> bool:  # noqa: ARG002 - for connections that deliver a result in parts
        """Returns whether a result is still incomplete."""
        return False

    async def _resolve_later(self, reply: Reply) -> None:
        await self._before_result(reply.value)
        self._resolve(reply)

    def _resolve(self, reply: Reply) -> None:
        entry = self._open.pop(reply.number, None)
        if entry is None or entry.answer.done():
            return  # the caller is gone
        if reply.error:
            # A worker that could not be constructed hangs up; this is not a death.
            self._closing |= reply.number == CONSTRUCTION
            entry.answer.set_exception(reply.error)
        else:
            entry.answer.set_result(reply)

    async def _explain_death(self) -> None:
        doing = self._doing()
        cause = await self._cause_of_death()
        if self._closing:
            return
        self._break(WorkerDiedError(f"{self.name} died while {doing} {cause}"))

    def _break(self, error: InterlaceError) -> None:
        self._dead = error
        self._fail_calls(error)
        self._on_failure(error)

    def _fail_calls(self, error: InterlaceError) -> None:
        """Fails all open calls, because the connection delivers no more replies."""
        for entry in self._open.values():
            if not entry.answer.done():
                entry.answer.set_exception(error)
        self._open.clear()

    def _doing(self) -> str:
        now = self._clock.now()
        running = [f"{entry.method}() since {now - entry.since_s:.1f} s" for entry in self._open.values()]
        return f"it ran {', '.join(running)}" if running else "it was idle"
