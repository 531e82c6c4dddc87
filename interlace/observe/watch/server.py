"""The server of the live page: it listens on this machine alone and only reads files."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.observe.report.page import LIVE_SCRIPTS, STYLES, render_live_frame
from interlace.observe.report.render import asset
from interlace.observe.report.steps import parse_choice
from interlace.observe.run_folder import RunFolder
from interlace.observe.watch.live_content import ContentSource

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]

HOST = "127.0.0.1"
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
"""Host names of requests that are answered: a web site whose name leads to this machine cannot read the page."""
_TYPES = {"css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; img-src data:; "
    "media-src data:; style-src 'self' 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class WatchServer:
    """Serves the live page of some runs, from start() to close()."""

    def __init__(self, folders: Sequence[RunFolder], step: int | None = None) -> None:
        """step: the step of the device chart and of the lanes at first; None takes the middle one."""
        self._source = ContentSource(folders, step)
        self._reading = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listens and returns the address. port: 0 takes a free port. Raises UserError if the port is taken."""
        try:
            from aiohttp import web
        except ImportError:
            raise UserError("`interlace watch` needs aiohttp: pip install 'interlace[serve]'.") from None
        app = web.Application(middlewares=[web.middleware(_check_host)])
        app.router.add_get("/", self._send_page)
        app.router.add_get("/assets/{name}", _send_asset)
        app.router.add_get("/content", self._send_content)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(f"cannot listen on {HOST}:{port}: {error.strerror}. Choose another --port.") from error
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stops listening."""
        if self._runner:
            await self._runner.cleanup()

    async def _send_page(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        del request
        return web.Response(text=render_live_frame(self._source.title, "assets"), content_type="text/html")

    async def _send_content(self, request: "web.Request") -> "web.Response":
        """Returns the content as JSON: status 204 if the client has it already, 400 for a step that is neither a number
        nor a name, 503 if a file cannot be read.
        """
        from aiohttp import web

        chosen = request.query.get("step")
        try:
            choice = parse_choice(chosen) if chosen else None
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        try:
            async with self._reading:
                content = await asyncio.to_thread(self._source.read, choice)
        except (UserError, OSError) as error:
            return web.Response(text=str(error), status=503)
        if request.query.get("tag") == content.tag:
            return web.Response(status=204)
        return web.Response(text=content.body, content_type="application/json")


async def _check_host(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
    from aiohttp import web

    if request.url.host not in LOCAL_NAMES:
        raise web.HTTPForbidden(text="This page is served to this machine alone.")
    response = await handler(request)
    response.headers.update(_HEADERS)
    return response


async def _send_asset(request: "web.Request") -> "web.Response":
    from aiohttp import web

    name = request.match_info["name"]
    if name not in (*STYLES, *LIVE_SCRIPTS):
        raise web.HTTPNotFound
    return web.Response(text=asset(name), content_type=_TYPES[name.rpartition(".")[2]])
