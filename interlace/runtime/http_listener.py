"""Listening socket of an HTTP server in this process's event loop, and the check of its keys. Runs on aiohttp."""

import secrets
from typing import TYPE_CHECKING

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from aiohttp import web


class HttpListener:
    """Serves one application from start() to close()."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None

    async def start(self, app: "web.Application", host: str, port: int) -> str:
        """Starts to listen and returns the address. port: 0 takes a free port. Raises UserError if it cannot listen."""
        from aiohttp import web

        # A client that disconnects cancels its handler, which withdraws its request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port.") from error
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stops listening and ends the open connections. Later calls have no effect."""
        if self._runner:
            await self._runner.cleanup()


def is_same_key(given: str, key: str) -> bool:
    """Compares keys in constant time. A header may have any bytes, which aiohttp decodes with surrogates."""
    return secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())
