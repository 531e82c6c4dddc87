"""The controller's end of a rank that Ray placed.

A rank that does not share the controller's memory puts contents of samples into the store of its node. A reader fetches
a content from the node that has it. The content is lost with the process that put it, which owns it.
"""

import asyncio
import socket
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError

from interlace.core import payload
from interlace.core.errors import InterlaceError, PayloadLostError, RemoteError, WorkerAbsentError, WorkerDiedError
from interlace.core.payload import PayloadStore, Stored
from interlace.core.sockets import detect_vanished_peer
from interlace.runtime.process.frames import Call, Reply
from interlace.runtime.process.rank import GRACE_S, ProcessRank
from interlace.runtime.process.shared import SharedArrays
from interlace.runtime.ray.actor import Endpoint, dumps
from interlace.runtime.ray.references import REFERENCES, Named, Referenced, collect_named, note_named, take_missing
from interlace.runtime.waits import Clock
from interlace.runtime.worker import Worker, WorkerContext


class RayRank(ProcessRank):
    """Rank whose calls use a socket. Objects in Ray's store, and the cause of a death, are transferred by Ray."""

    def __init__(
        self,
        actor: Any,
        context: WorkerContext,
        clock: Clock,
        shared: SharedArrays | None,
        on_failure: Callable[[Exception], None],
        lost_part: Callable[[], str],
    ) -> None:
        """actor: Ray's handle of a RankActor. lost_part: returns the missing Ray process, or an empty string."""
        super().__init__(context, clock, shared, on_failure, dumps=dumps)
        self._actor, self._lost_part = actor, lost_part
        self._where = ""
        """The process and its machine, for messages."""
        self._late: deque[tuple[Reply, Sequence[Referenced]]] = deque()
        """Replies whose objects wait for their references, and the replies after them."""
        self._contents: weakref.WeakSet[RemoteContent[Any]] = weakref.WeakSet()
        """Contents that the process owns."""
        self._life: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Completes when the process ends, with Ray's explanation as the exception."""

    async def start(self, factory: Callable[[WorkerContext], Worker], within_s: float) -> None:
        """Connects and constructs the worker. A UserError passes unchanged; any other error becomes a RemoteError.

        within_s: seconds for Ray to start the process. Raises WorkerAbsentError if it takes longer, and WorkerDiedError
        if the process dies while it constructs the worker.
        """
        try:
            endpoint: Endpoint = await asyncio.wait_for(_await_reference(self._actor.endpoint.remote()), within_s)
        except TimeoutError:
            raise WorkerAbsentError(
                f"{self.name} did not start within {within_s:.0f} s (cluster.start_timeout_s). Its devices are "
                "reserved on one node, which may be gone."
            ) from None
        except RayError as error:
            raise WorkerAbsentError(f"{self.name} died before its worker was made. Ray says: {error}") from error
        self._where, self._process_number = f"(process {endpoint.process} on {endpoint.host})", endpoint.process
        self.process_here = endpoint.process if endpoint.is_here else None
        if not endpoint.shares_memory:
            self._shared = None
        self._life = asyncio.ensure_future(_await_end(self._actor.run.remote(factory, self._context)))
        self._life.add_done_callback(_retrieve_exception)  # if another failure ends the run, nothing awaits this future
        constructed = self.open_calls.add("__init__")
        constructed.add_done_callback(_retrieve_exception)  # nor this one
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self._connection, endpoint.host, endpoint.port)
        _tune_socket(transport.get_extra_info("socket"))
        transport.write(endpoint.token)
        self._connection.transport = transport
        try:
            outcomes: set[asyncio.Future[Any]] = {constructed, self._life}
            await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            reason = self._life.exception() if self._life.done() and not self._dead else None
            if reason and not isinstance(reason, RayActorError):  # a death is explained as one of a later call
                # The worker's constructor was never reached: its pickle could not be read there.
                raise RemoteError(self._context.group, self._context.rank, "__init__", str(reason)) from reason
            await constructed
        except BaseException:
            await self.close()
            raise

    async def _end(self) -> None:
        if self._connection.transport:
            await asyncio.wait({self._life}, timeout=GRACE_S)
        ray.kill(self._actor)
        self._lose_contents()

    async def _cause_of_death(self) -> str:
        await asyncio.wait({self._life}, timeout=GRACE_S)
        reason = "its connection broke"
        if self._life.done():
            error = self._life.exception()
            reason = str(error) if error else "its serving thread ended"
        if lost := self._lost_part():
            return (
                f"{self._where}, because {lost} is gone, and it cannot continue without it. If that was killed because "
                f"memory ran out, reduce the memory use of the run. Ray says: {reason}"
            )
        return f"{self._where}. If memory ran out there, use smaller batches or other devices. Ray says: {reason}"

    async def _prepare_call(self, call: Call) -> list[bytes | memoryview]:
        with collect_named() as named:
            parts = await super()._prepare_call(call)
        self._pass_references(named)
        return parts

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        with collect_named() as named:
            super().call_now(method, args)
        self._pass_references(named)

    def _pass_references(self, named: Named) -> None:
        """Passes the references of objects to the process, at the same time as the call that names them.

        To wait for their arrival would take a round trip, after which the call would take another one.
        """
        if named:
            self._start_task(self._await_arrival(self._actor.take.remote(dict(named))))

    async def _await_arrival(self, taken: Awaitable[None]) -> None:
        try:
            await taken
        except RayError as error:
            if self.is_open:
                self._lose(error)

    def _handle_reply(self, reply: Reply) -> None:
        """Handles a reply after the references of its objects have arrived, and replies in their order."""
        missing = take_missing()
        if not missing and not self._late:
            super()._handle_reply(reply)
            return
        self._late.append((reply, missing))
        if len(self._late) == 1:
            self._start_task(self._handle_late_replies())

    async def _handle_late_replies(self) -> None:
        while self._late:
            reply, missing = self._late[0]
            keys, references = [named.key for named in missing], []
            try:
                if keys:
                    references = await self._actor.hand_over.remote(keys)
            except RayError as error:
                self._lose(error)
                return
            for named, reference in zip(missing, references, strict=True):
                named.ref = reference
                if isinstance(named, RemoteContent):
                    self._contents.add(named)
            self._late.popleft()
            super()._handle_reply(reply)

    def _fail_connection(self, error: InterlaceError) -> None:
        self._lose_contents()
        super()._fail_connection(error)

    def _lose_contents(self) -> None:
        for content in self._contents:
            content.has_ended = True

    def _lose(self, error: RayError) -> InterlaceError:
        """Counts the rank as dead, because Ray does not reach its process. Returns the error of its calls."""
        if self._dead is None:
            self._fail_connection(WorkerDiedError(f"{self.name} cannot be reached {self._where}. Ray says: {error}"))
        assert self._dead is not None
        return self._dead


def _tune_socket(connection: socket.socket) -> None:
    """Sends small messages at once, and detects a vanished peer (a node that lost power) in seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    detect_vanished_peer(connection, idle_s=5, probe_every_s=2, num_probes=3)


def _retrieve_exception(future: "asyncio.Future[Any]") -> None:
    """Marks the exception of a future as seen, so that asyncio does not print it when the future is deleted."""
    if not future.cancelled():
        future.exception()


async def _await_reference(reference: Awaitable[Any]) -> Any:
    return await reference


async def _await_end(reference: Awaitable[None]) -> None:
    await reference


T = TypeVar("T")


class RemoteContent(Stored[T]):
    """A value in the object store of a machine."""

    __slots__ = ("has_ended", "key", "ref")
    travels = True

    def __init__(self, key: str, ref: Any = None) -> None:
        """key: names the object across processes. ref: Ray's reference. If None, it was passed on, or follows."""
        super().__init__()
        self.key, self.ref, self.has_ended = key, ref, False
        if ref is None:
            REFERENCES.find(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if payload.is_sent_by_value(self):
            return Stored, (self.read(),)
        note_named(self)
        return RemoteContent, (self.key,)

    @property
    def is_lost(self) -> bool:
        """True if the process that owns the value has ended."""
        return self.has_ended

    def _load_parts(self) -> Sequence[NDArray[np.uint8]]:
        try:
            # The parts are copied, because the store's memory is read-only.
            return [np.array(part) for part in ray.get(REFERENCES.wait_for(self))]
        except RayError as error:
            self.has_ended = True
            raise PayloadLostError(f"the content of a sample is lost: {error}") from error


class RemotePayloads(PayloadStore):
    """Writer of values into the object store of this machine."""

    def __init__(self) -> None:
        """Needs no folder."""

    def _keep(self, parts: Sequence[memoryview]) -> Stored[Any]:
        ref = ray.put([np.frombuffer(part, np.uint8) for part in parts])
        return RemoteContent(ref.hex(), ref)
