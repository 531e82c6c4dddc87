"""What runs in a rank's process."""

import asyncio
import contextlib
import hmac
import os
import queue
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from interlace.core.errors import RemoteError, UserError
from interlace.runtime.group import turn_of
from interlace.runtime.ray.frames import CONSTRUCTION, UNAWAITED, Assembler, Call, Reply, encode
from interlace.runtime.ray.shared import SharedArrays, write_all
from interlace.runtime.ray.tensors import store_large, stored_in
from interlace.runtime.tracer import MakeTracer, Tracer
from interlace.runtime.worker import Worker, WorkerContext

TOKEN_BYTES = 32
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a rank listens for its controller."""

    host: str
    port: int
    token: bytes
    """Sent first; whoever does not know it is not heard."""
    process: int
    shares_memory: bool
    """Whether the controller's folder of shared arrays is here too."""


class RankActor:
    """A Ray actor around one worker. Ray places and watches it; its operations come over a socket of its own.

    A plain operation runs on the thread of run(), in the order of the calls. A coroutine runs on the actor's event
    loop, where those that need no device overlap. A concurrent operation runs at once, on the thread that receives.
    """

    def __init__(self, name: str, folder: str, search_path: Sequence[str], shared: Path | None) -> None:
        """name: stands before each line that is printed here. shared: see SharedArrays; it may be on another machine.

        folder, search_path: the controller's working directory and sys.path, so that relative paths and modules mean
        the same here, where the file system is shared.
        """
        self._name = name
        sys.path += [entry for entry in search_path if entry not in sys.path]
        if Path(folder).is_dir():
            os.chdir(folder)
        # The controller's view says what goes on; bars of many processes would only write between its lines.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        self._token = secrets.token_bytes(TOKEN_BYTES)
        is_here = shared is not None and shared.is_dir()
        self._shared = SharedArrays(shared, passes_on=False) if shared and is_here else None
        self._endpoint = Endpoint(
            host=host,
            port=self._listener.getsockname()[1],
            token=self._token,
            process=os.getpid(),
            shares_memory=is_here,
        )
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        self._writing = threading.Lock()
        self._sent_tables: dict[str, Any] = {}
        self._received_tables: dict[str, Any] = {}
        self._connection: socket.socket
        self._context: WorkerContext
        self._worker: Worker
        self._tracer: Tracer

    def __repr__(self) -> str:
        return self._name

    def endpoint(self) -> Endpoint:
        """Where to connect."""
        return self._endpoint

    def hand_over(self, keys: list[str]) -> list[Any]:
        """References of stored tables that a reply named."""
        return [self._sent_tables.pop(key) for key in keys]

    def take(self, tables: dict[str, list[Any]]) -> None:
        """References of stored tables that the next call names. In lists, or Ray would fetch them."""
        self._received_tables.update({key: refs[0] for key, refs in tables.items()})

    def start_trace(self, make: MakeTracer) -> None:
        """Starts recording this process."""
        self._tracer = make()
        self._tracer.start()

    def stop_trace(self) -> bytes:
        """Ends it."""
        return self._tracer.stop()

    def run(self, factory: Callable[[WorkerContext], Worker], context: WorkerContext) -> None:
        """Constructs the worker and serves it until the controller hangs up."""
        self._context = context
        self._connection = self._accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if not self._construct(factory):
                return
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
            threading.Thread(target=self._receive, name="calls", daemon=True).start()
            while (call := self._calls.get()) is not None:
                self._run(call)
            self._worker.close()
        finally:
            # Wakes the controller, if it is there, and the thread that receives, whatever ended this.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> socket.socket:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(10.0)
            given = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(given, self._token):
                connection.settimeout(None)
                self._listener.close()
                return connection
            connection.close()

    def _construct(self, factory: Callable[[WorkerContext], Worker]) -> bool:
        is_made = False
        with self._reporting(CONSTRUCTION, "__init__"):
            self._worker = factory(self._context)
            is_made = True
            self._send(Reply(number=CONSTRUCTION))
        return is_made

    def _receive(self) -> None:
        # What cannot be read, or a concurrent operation that raises: nobody waits for it, so it ends the run.
        with contextlib.suppress(OSError), self._reporting(UNAWAITED, "receive"):
            assembler = Assembler(self._shared)
            while count := self._connection.recv_into(assembler.space, min(len(assembler.space), _CHUNK)):
                message = assembler.received(count)
                if isinstance(message, Call):
                    self._dispatch(message)
        self._calls.put(None)

    def _dispatch(self, call: Call) -> None:
        for table in stored_in((*call.args, *call.kwargs.values())):
            table.ref = self._received_tables.pop(table.key)
        if call.number == UNAWAITED:
            getattr(self._worker, call.method)(*call.args)
        elif asyncio.iscoroutinefunction(getattr(self._worker, call.method)):
            self._start(call)
        else:
            self._calls.put(call)

    def _run(self, call: Call) -> None:
        with self._reporting(call.number, call.method):
            self._reply(call, getattr(self._worker, call.method)(*call.args, **call.kwargs))

    def _start(self, call: Call) -> None:
        # Not a method: one coroutine method would make Ray run all methods on an event loop, and run() would block it.
        async def finish() -> None:
            with self._reporting(call.number, call.method):
                async with turn_of(self._worker, call.method, self._turn):
                    value = await getattr(self._worker, call.method)(*call.args, **call.kwargs)
                self._reply(call, value)

        asyncio.run_coroutine_threadsafe(finish(), self._loop)

    def _reply(self, call: Call, value: Any) -> None:
        value = store_large(value)
        self._sent_tables.update({table.key: table.ref for table in stored_in((value,)) if table.ref is not None})
        self._send(Reply(number=call.number, value=value))

    def _send(self, reply: Reply) -> None:
        parts = encode(reply, self._shared)
        with self._writing:
            write_all(self._connection.sendmsg, parts)

    @contextlib.contextmanager
    def _reporting(self, number: int, method: str) -> Iterator[None]:
        """What is raised inside goes to the controller: a UserError as it is, anything else with its traceback."""
        try:
            yield
        except UserError as error:
            self._send(Reply(number=number, error=error))
        except Exception:  # noqa: BLE001 - not swallowed: it is raised again where the operation was called
            where = self._context.group, self._context.rank, method
            self._send(Reply(number=number, error=RemoteError(*where, traceback.format_exc())))
