"""The controller's end of a rank."""

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from interlace.core.errors import InterlaceError, RemoteError, WorkerDiedError
from interlace.runtime.clock import Clock
from interlace.runtime.ray.actor import Endpoint
from interlace.runtime.ray.frames import CONSTRUCTION, UNAWAITED, Assembler, Call, Reply, encode
from interlace.runtime.ray.shared import SharedArrays
from interlace.runtime.ray.tensors import stored_in
from interlace.runtime.tracer import MakeTracer
from interlace.runtime.worker import Worker, WorkerContext

GRACE_S = 5.0
"""For a running operation to end, and for Ray to say why a process died."""
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Open:
    """A call without a reply so far."""

    method: str
    since_s: float
    answer: "asyncio.Future[Any]"
    given: tuple[Any, ...] = ()
    """Kept until the reply, even where nobody waits for it: arrays that the message only names must stay."""


class RayRank(asyncio.BufferedProtocol):
    """Sends calls and gives out replies. A process that dies ends the run with an error that says what it was doing."""

    def __init__(
        self,
        actor: Any,
        context: WorkerContext,
        clock: Clock,
        shared: SharedArrays | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """actor: Ray's handle of a RankActor. on_failure: told what nobody waits for, a death first of all."""
        self._actor, self._context, self._clock, self._on_failure = actor, context, clock, on_failure
        self._shared = shared
        self._assembler = Assembler(shared)
        self._open: dict[int, _Open] = {}
        self._next = CONSTRUCTION
        self._sending = asyncio.Lock()
        self._closing = self._closed = False
        self._dead: InterlaceError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint: Endpoint
        self._life: asyncio.Future[None]
        """Ends when the process does, with Ray's word on why."""
        self._transport: asyncio.Transport | None = None

    async def start(self, factory: Callable[[WorkerContext], Worker]) -> None:
        """Connects, and constructs the worker. A UserError passes as it is; anything else becomes a RemoteError."""
        try:
            self._endpoint = await self._actor.endpoint.remote()
        except RayError as error:
            raise WorkerDiedError(f"{self.name} died before its worker was made. Ray says: {error}") from error
        if not self._endpoint.shares_memory:
            self._shared = None
        self._life = asyncio.ensure_future(_finished(self._actor.run.remote(factory, self._context)))
        constructed = self._expect("__init__")
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, self._endpoint.host, self._endpoint.port)
        _tune(transport.get_extra_info("socket"))
        transport.write(self._endpoint.token)
        self._transport = transport
        try:
            await asyncio.wait({constructed, self._life}, return_when=asyncio.FIRST_COMPLETED)
            if self._life.done() and (reason := self._life.exception()) and not self._dead:
                # It never came to the worker: what makes it could not be read there.
                raise RemoteError(self._context.group, self._context.rank, "__init__", str(reason)) from reason
            await constructed
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On the rank's process, after the operations called before."""
        async with self._sending:
            await self._hand_over_tables((*args, *kwargs.values()))
            if self._dead:
                raise self._dead
            number = self._next
            call = Call(number=number, method=method, args=args, kwargs=kwargs)
            parts = self._encoded(call, self._shared)
            answer = self._expect(method, (args, kwargs))
            self._write(parts)
        return await answer

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Beside whatever runs, and before whatever is called later."""
        self._write(self._encoded(Call(number=UNAWAITED, method=method, args=args)))

    @property
    def is_open(self) -> bool:
        """Whether its process is there."""
        return not self._closed

    async def start_trace(self, make: MakeTracer) -> None:
        """Starts recording in its process; goes through Ray, past whatever runs."""
        await self._actor.start_trace.remote(make)

    async def stop_trace(self) -> bytes:
        """Ends it and fetches the recording."""
        return await self._actor.stop_trace.remote()

    async def close(self) -> None:
        """Lets the running operation end, for a few seconds, and then ends the process."""
        if self._closed:
            return
        self._closed = self._closing = True
        if self._transport:
            self._transport.close()
            await asyncio.wait({self._life}, timeout=GRACE_S)
        ray.kill(self._actor)

    def _expect(self, method: str, given: tuple[Any, ...] = ()) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[self._next] = _Open(method=method, since_s=self._clock.now(), answer=answer, given=given)
        self._next += 1
        return answer

    def _encoded(self, call: Call, shared: SharedArrays | None = None) -> list[bytes | memoryview]:
        try:
            return encode(call, shared)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InterlaceError(
                f"{self.name}.{call.method}(): an argument cannot be sent to another process: {error}. Pass data, "
                "not open files, locks, tasks or functions that hold such things."
            ) from error

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._transport:
            for part in parts:
                self._transport.write(part)

    async def _hand_over_tables(self, values: Sequence[Any]) -> None:
        # References go through Ray, which counts them; the frame names them only.
        tables = {table.key: [table.ref] for table in stored_in(values)}
        if tables:
            await self._actor.take.remote(tables)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the message says how much is to come
        """Where the transport writes what it receives."""
        return self._assembler.space[:_CHUNK]

    def buffer_updated(self, nbytes: int) -> None:
        """The transport received so much."""
        message = self._assembler.received(nbytes)
        if not isinstance(message, Reply):
            return
        if message.number == UNAWAITED and message.error:
            self._on_failure(message.error)
        elif tables := stored_in((message.value,)):
            self._start(self._resolve_with_tables(message, [table.key for table in tables]))
        else:
            self._resolve(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - Ray knows more
        """The process died, or this end closed."""
        if not self._closing:
            self._start(self._explain_death())

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resolve(self, reply: Reply) -> None:
        entry = self._open.pop(reply.number, None)
        if entry is None or entry.answer.done():
            return  # whoever asked is gone
        if reply.error:
            # A worker that could not be made hangs up, and is not to be missed.
            self._closing |= reply.number == CONSTRUCTION
            entry.answer.set_exception(reply.error)
        else:
            entry.answer.set_result(reply.value)

    async def _resolve_with_tables(self, reply: Reply, keys: list[str]) -> None:
        references = await self._actor.hand_over.remote(keys)
        for table, reference in zip(stored_in((reply.value,)), references, strict=True):
            table.ref = reference
        self._resolve(reply)

    async def _explain_death(self) -> None:
        doing = self._doing()
        await asyncio.wait({self._life}, timeout=GRACE_S)
        if self._closing:
            return
        reason = "its connection broke"
        if self._life.done():
            error = self._life.exception()
            reason = str(error) if error else "its serving thread ended"
        self._dead = WorkerDiedError(
            f"{self.name} died while {doing} (process {self._endpoint.process} on {self._endpoint.host}). If memory "
            f"ran out there, give it less, or other devices. Ray says: {reason}"
        )
        for entry in self._open.values():
            if not entry.answer.done():
                entry.answer.set_exception(self._dead)
        self._on_failure(self._dead)

    def _doing(self) -> str:
        now = self._clock.now()
        running = [f"{entry.method}() since {now - entry.since_s:.1f} s" for entry in self._open.values()]
        return f"it ran {', '.join(running)}" if running else "it was idle"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self._context.group}[rank {self._context.rank}]"


def _tune(connection: socket.socket) -> None:
    """Small messages at once; a peer that is gone without a word (a node that lost power) is noticed in seconds."""
    for option, value in [("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)]:
        if hasattr(socket, option):  # not every platform has each of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _finished(reference: Awaitable[None]) -> None:
    await reference
