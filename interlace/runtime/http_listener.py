"""Listening socket of an HTTP server in this process's event loop, and the check of its keys. Runs on aiohttp."""

import asyncio
import errno
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, first_line
from interlace.core.sockets import detect_vanished_peer
from interlace.core.tasks import cancel_tasks

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


IDLE_S = 30
"""Seconds without a packet after which the system probes whether a client's machine exists. With Linux's default, a
request of a client that vanished would keep its generation for two hours."""
PROBE_EVERY_S = 10
NUM_PROBES = 3
"""Number of probes without an answer after which a connection is closed, which cancels its request."""


FIRST_REQUEST_S = 60.0
"""Seconds within which a client sends the head of its first request. A client without a key could otherwise hold all
file descriptors of the process with connections on which it sends nothing, or a byte from time to time."""
KEEP_ALIVE_S = 300.0
"""Seconds without a request after which a connection is closed."""


class HttpListener:
    """Serves one application from start() to close()."""

    def __init__(self, *, first_request_s: float = FIRST_REQUEST_S) -> None:
        """first_request_s: see FIRST_REQUEST_S."""
        self._runner: web.AppRunner | None = None
        self._first_request_s = first_request_s
        self._served: set[RequestHandler] = set()
        """Open connections on which a request has arrived."""
        self._sweep: asyncio.Task[None] | None = None

    async def start(self, app: "web.Application", host: str, port: int) -> str:
        """Starts to listen and returns the address. port: 0 takes a free port. Raises UserError if it cannot listen."""
        from aiohttp import web

        if not host:
            raise UserError(
                "the host to listen on is empty. Give --host 127.0.0.1 for this machine alone, or --host 0.0.0.0 for "
                "all addresses."
            )

        @web.middleware
        async def note_request(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
            self._served.add(request.protocol)
            return await handler(request)

        app.middlewares.insert(0, note_request)
        # A client that disconnects cancels its handler, which withdraws its request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5, keepalive_timeout=KEEP_ALIVE_S
        )
        await self._runner.setup()
        try:
            for listening in await _open_sockets(host, port):
                await web.SockSite(self._runner, listening).start()
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name with an empty or too long part
            await self._runner.cleanup()
            reason = error.strerror if isinstance(error, OSError) else first_line(error)
            is_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
            option = "--port" if is_port else "--host"
            raise UserError(f"cannot listen on {host}:{port}: {reason}. Choose another {option}.") from error
        self._sweep = asyncio.create_task(self._close_silent_connections(), name="silent connections")
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stops listening and ends the open connections. Later calls have no effect."""
        if self._sweep:
            await cancel_tasks([self._sweep])
        if self._runner:
            await self._runner.cleanup()

    async def _close_silent_connections(self) -> None:
        """Closes the connections on which no whole head of a request has arrived in time."""
        opened_s: dict[RequestHandler, float] = {}
        while True:
            await asyncio.sleep(self._first_request_s / 4)
            server = self._runner.server if self._runner else None
            connections = server.connections if server else []
            self._served.intersection_update(connections)
            now_s = time.monotonic()
            opened_s = {each: opened_s.get(each, now_s) for each in connections if each not in self._served}
            for connection, since_s in opened_s.items():
                if now_s - since_s >= self._first_request_s:
                    connection.force_close()


async def _open_sockets(host: str, port: int) -> list[socket.socket]:
    """Opens a listening socket for each address of the host that this machine has. Raises OSError if it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    errors: list[OSError] = []
    for family, *_, address in dict.fromkeys(found):
        # With port 0 the system chooses the port of the first address, which the other addresses share.
        chosen = opened[0].getsockname()[1] if opened else port
        try:
            opened.append(socket.create_server((address[0], chosen, *address[2:]), family=family))
        except OSError as error:
            errors.append(error)
    # A machine without IPv6 lacks the address ::1 of localhost.
    serious = [error for error in errors if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)]
    if serious or not opened:
        for listening in opened:
            listening.close()
        raise (serious or errors)[0]
    for listening in opened:
        detect_vanished_peer(listening, idle_s=IDLE_S, probe_every_s=PROBE_EVERY_S, num_probes=NUM_PROBES)
    return opened


def is_same_key(given: str, key: str) -> bool:
    """Compares keys in constant time. A header may have any bytes, which aiohttp decodes with surrogates."""
    return secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())
