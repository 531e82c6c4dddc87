"""HTTP to one server: its address, its key, and a translation of its errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from interlace.core.errors import DiskFullError, UserError
from interlace.core.types import JSON
from interlace.engines.rollout.services.protocol import OutOfMemoryError, ServiceError

UNIX = "unix:"
"""Prefix of an address that is a socket file of this machine: `unix:/path/to/socket`."""
SCHEMES = ("http://", "https://", UNIX)
"""Prefixes of the addresses of servers."""
LARGEST_LINE = 1 << 26
"""Longest line of a stream, in bytes."""
MEMORY_TEXTS = ("out of memory", "OutOfMemory", "Cannot allocate memory")
"""Texts that identify a server's error as a lack of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address of a server, and its key."""

    url: str
    """http://HOST:PORT, https://..., or unix:PATH."""
    key: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(SCHEMES):
            raise UserError(
                f"the address {self.url!r} is not one of a server: write http://HOST:PORT, https://HOST or unix:PATH."
            )


IDLE_S = 2.0
"""Seconds after which an idle connection is closed. The servers of vLLM and SGLang close theirs after 5 s. A request
that is sent at that moment is lost with its connection, and the server would count as lost."""


class Connection:
    """Connection pool to one server. Made and used on one event loop."""

    def __init__(self, address: Address) -> None:
        try:
            import aiohttp
        except ImportError:
            raise UserError("engines at an address need aiohttp: pip install 'interlace[serve]'.") from None
        self.url = address.url
        is_file = address.url.startswith(UNIX)
        self._base = "http://server" if is_file else address.url.rstrip("/")
        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            connector=(
                aiohttp.UnixConnector(address.url.removeprefix(UNIX), limit=0, keepalive_timeout=IDLE_S)
                if is_file
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            ),
            headers={"Authorization": f"Bearer {address.key}"} if address.key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            read_bufsize=LARGEST_LINE,
        )

    async def get(self, path: str, *, timeout_s: float) -> dict[str, JSON]:
        """Requests a JSON object. Raises the errors of post()."""
        return await self._send_request("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, JSON] | None = None, *, timeout_s: float) -> dict[str, JSON]:
        """Sends a JSON object and returns the answer; {} if it is empty or is not an object.

        Raises ServiceError if the server does not answer within timeout_s or reports a fault. Raises UserError for 4xx,
        because the request is wrong and any other server would refuse it too.
        """
        return await self._send_request("POST", path, body, timeout_s)

    async def lines(
        self, path: str, body: Mapping[str, JSON], on_answer: Callable[[], None] = lambda: None
    ) -> AsyncIterator[bytes]:
        """Sends a JSON object and yields the lines of the answer as they arrive. Raises the errors of post().

        on_answer: called when the answer begins, before its first line.
        """
        try:
            async with self._session.post(f"{self._base}{path}", json=body) as response:
                if response.status != 200:
                    self._raise_error(path, response.status, await response.text())
                on_answer()
                async for line in response.content:
                    yield line
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            raise self._make_loss_error(path, error) from error

    async def close(self) -> None:
        await self._session.close()

    async def _send_request(
        self, method: str, path: str, body: Mapping[str, JSON] | None, timeout_s: float
    ) -> dict[str, JSON]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, f"{self._base}{path}", json=body) as response,
            ):
                text = await response.text()
        except TimeoutError as error:
            raise ServiceError(f"{self.url}{path} did not answer within {timeout_s:g} s.") from error
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            raise self._make_loss_error(path, error) from error
        if response.status >= 300:
            self._raise_error(path, response.status, text)
        try:
            found = json.loads(text) if text.strip() else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {"value": found}

    def _make_loss_error(self, path: str, error: Exception) -> ServiceError:
        return ServiceError(f"{self.url}{path}: {type(error).__name__}: {error}")

    def _raise_error(self, path: str, status: int, text: str) -> None:
        said = f"{self.url}{path} answered {status}: {_read_message(text)}"
        if any(one in text for one in MEMORY_TEXTS):
            raise OutOfMemoryError(said)
        if status == 507:
            raise DiskFullError(f"{said} Make room on the server's disk.")
        if status in (401, 403):
            raise UserError(f"{said} The key is wrong or missing: name the variable that holds it in rollout.key_env.")
        if status == 404:
            raise UserError(
                f"{said} The server has no such route: rollout.dialect is wrong, or the server was started without it. "
                "`interlace serve` has the engine routes if it serves one native engine, as with cluster.devices=cpu:1."
            )
        if 400 <= status < 500:
            raise UserError(said)
        raise ServiceError(said)


def _read_message(text: str) -> str:
    """Returns the message in an error body of this package's or OpenAI's form; else the beginning of the body."""
    try:
        found = json.loads(text)
        return str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:300]
