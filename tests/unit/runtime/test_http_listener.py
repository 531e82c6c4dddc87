"""The HTTP server notices clients that vanished without closing their connection, or send no request."""

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


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("", "is empty. Give --host 127.0.0.1 for this machine alone"),
        ("a..b", "cannot listen on a..b:0: .* Choose another --host"),
        ("198.51.100.1", "cannot listen on 198.51.100.1:0: .* Choose another --host"),
    ],
)
def test_a_host_that_is_no_address_of_this_machine_is_refused(host: str, words: str) -> None:
    """An empty host listened on all addresses, and the advice for another one was a port."""
    with pytest.raises(UserError, match=words):
        asyncio.run(HttpListener().start(web.Application(), host, 0))


def test_a_client_that_sends_no_whole_request_is_disconnected() -> None:
    """A client without a key held file descriptors for ever, until the server could accept no other client."""

    async def answer(request: web.Request) -> web.Response:
        del request
        return web.Response(text="ok")

    async def scenario() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        listener = HttpListener(first_request_s=0.5)
        url = await listener.start(app, "127.0.0.1", 0)
        port = int(url.rpartition(":")[2])
        served_reader, served = await asyncio.open_connection("127.0.0.1", port)
        request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        served.write(request)
        assert b"200" in await served_reader.readline()
        silent, _kept = await asyncio.open_connection("127.0.0.1", port)
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"GET / HTTP/1.1\r\nX-Part: a")
        async with asyncio.timeout(60):
            assert await silent.read() == b"" and await slow.read() == b""
        served.write(request)  # the connection of a client that sent a request stays open
        answers = b""
        async with asyncio.timeout(60):
            while answers.count(b"ok") < 2:
                answers += await served_reader.read(4096)
        await listener.close()

    asyncio.run(scenario())
