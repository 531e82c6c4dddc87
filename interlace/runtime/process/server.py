"""The worker's end of a connection to its controller."""

import asyncio
import contextlib
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from interlace.core.errors import DiskFullError, RemoteError, UserError
from interlace.core.host_memory import freeze_heap
from interlace.core.payload import Dumps
from interlace.runtime.process.frames import CONSTRUCTION, LAST, UNAWAITED, Assembler, Call, Reply, encode, plain_dumps
from interlace.runtime.process.shared import SharedArrays, write_all
from interlace.runtime.rank import turn_of
from interlace.runtime.worker import RAISED, Worker, WorkerContext

ALONE_S = 10.0
"""Seconds that an operation, or the construction of the worker, has to end after the controller hung up. A living
controller kills the process earlier."""
_CHUNK = 1 << 20


class WorkerServer:
    """Runs the operations that arrive over a connection.

    A plain operation runs on the thread of run(), in the order of the calls. A coroutine runs on a separate event loop;
    coroutines that need no device overlap there. A concurrent operation runs at once, on the receiving thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: WorkerContext,
        shared: SharedArrays | None,
        *,
        dumps: Dumps = plain_dumps,
    ) -> None:
        """shared: see SharedArrays; None if the controller is on another machine."""
        self._connection, self._context, self._shared, self._dumps = connection, context, shared, dumps
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        self._writing = threading.Lock()
        self._idle = threading.Event()
        self._is_ended = False
        """True if the controller ended this worker. If it died, what outlives the command must stay."""
        self._worker: Worker | None = None

    def run(self, factory: Callable[[WorkerContext], Worker]) -> None:
        """Constructs the worker and serves it until the controller ends it, which closes the worker, or dies."""
        try:
            # Before the construction, which may wait for other ranks for half an hour after the controller has died.
            threading.Thread(target=self._receive_calls, name="calls", daemon=True).start()
            worker = self._construct_worker(factory)
            if worker is None:
                return
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
            freeze_heap()
            while (call := self._calls.get()) is not None:
                self._run(call)
            self._idle.set()
            if self._is_ended:
                worker.close()
        finally:
            self._idle.set()
            # Wakes the controller, if it exists, and the receiving thread, regardless of the cause.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def encode_reply(self, reply: Reply) -> Sequence[bytes | memoryview]:
        return encode(reply, self._shared, self._dumps)

    def _construct_worker(self, factory: Callable[[WorkerContext], Worker]) -> Worker | None:
        start_s = time.monotonic()
        with self._send_errors(CONSTRUCTION, "__init__"):
            self._worker = factory(self._context)
            self._send_reply(Reply(number=CONSTRUCTION, ran_s=(start_s, time.monotonic())))
        return self._worker

    def _receive_calls(self) -> None:
        # No caller waits for unreadable messages or for concurrent operations, so their errors end the run.
        with contextlib.suppress(OSError), self._send_errors(UNAWAITED, "receive"):
            assembler = Assembler(self._shared)
            while count := self._connection.recv_into(assembler.space, min(len(assembler.space), _CHUNK)):
                for message in assembler.received(count):
                    self._dispatch_call(message)
        self._calls.put(None)
        if not self._idle.wait(ALONE_S):
            os._exit(1)  # a killed controller cannot end this process, and the running operation may never end

    def _dispatch_call(self, call: Call | Reply) -> None:
        if isinstance(call, Reply):
            return
        if call.number == LAST:
            self._is_ended = True
            return
        if call.number == UNAWAITED:
            getattr(self._worker, call.method)(*call.args)
        elif asyncio.iscoroutinefunction(getattr(self._worker, call.method)):
            asyncio.run_coroutine_threadsafe(self._await_call(call), self._loop)
        else:
            self._calls.put(call)

    def _run(self, call: Call) -> None:
        with self._send_errors(call.number, call.method):
            start_s = time.monotonic()
            value = getattr(self._worker, call.method)(*call.args, **call.kwargs)
            self._send_reply(Reply(number=call.number, value=value, ran_s=(start_s, time.monotonic())))

    async def _await_call(self, call: Call) -> None:
        with self._send_errors(call.number, call.method):
            async with turn_of(self._worker, call.method, self._turn):
                start_s = time.monotonic()
                value = await getattr(self._worker, call.method)(*call.args, **call.kwargs)
                ran_s = start_s, time.monotonic()
            self._send_reply(Reply(number=call.number, value=value, ran_s=ran_s))

    def _send_reply(self, reply: Reply) -> None:
        parts = self.encode_reply(reply)
        with self._writing:
            write_all(self._connection.sendmsg, parts)

    @contextlib.contextmanager
    def _send_errors(self, number: int, method: str) -> Iterator[None]:
        """Sends errors raised inside to the controller: a UserError's message, or any other error's traceback."""
        try:
            yield
        except UserError as error:  # the controller may be unable to unpickle a subclass that the worker defines
            kind = DiskFullError if isinstance(error, DiskFullError) else UserError
            self._send_reply(Reply(number=number, error=kind(str(error))))
        except RAISED:  # not swallowed: it is raised again at the caller of the operation
            where = self._context.group, self._context.rank, method
            self._send_reply(Reply(number=number, error=RemoteError(*where, traceback.format_exc())))
