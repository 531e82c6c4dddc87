"""The HTTP server notices a client whose machine vanished without closing its connection."""

import asyncio
import contextlib
import socket
import sys

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from interlace.core.errors import UserError
from interlace.runtime import http_listener
from interlace.runtime.http_listener import HttpListener

TCP_REPAIR = 19
"""Option of Linux with which close() sends nothing, as if the machine had lost power."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_REPAIR")
def test_a_request_is_cancelled_when_its_client_has_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "IDLE_S", 1)

    async def body() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def generate(request: web.Request) -> web.Response:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return web.Response()

        app = web.Application()
        app.router.add_get("/", generate)
        listener = HttpListener()
        url = await listener.start(app, "127.0.0.1", 0)
        client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 30)
        try:
            client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError:
            pytest.skip("TCP_REPAIR needs CAP_NET_ADMIN")
        finally:
            client.close()
        await asyncio.wait_for(cancelled.wait(), 30)
        await listener.close()

    asyncio.run(body())


def test_all_addresses_of_a_host_are_served_and_a_taken_port_is_refused() -> None:
    async def body() -> None:
        first, second = HttpListener(), HttpListener()
        port = int((await first.start(web.Application(), "localhost", 0)).rpartition(":")[2])
        for found in await asyncio.get_running_loop().getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server(found[4], family=found[0]):
                pytest.fail(f"{found[4]} is not served")
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await second.start(web.Application(), "127.0.0.1", port)
        await first.close()

    asyncio.run(body())
