"""Client protocol of an engine service: a process with an address, a health state, a version and a capacity.

The module also contains the manifest by which a server reads a version, and HTTP to one server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import TypeAdapter

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.core.types import JSON, FinishReason, Request
from interlace.weights.ref import WeightPart, WeightRef

PauseMode: TypeAlias = Literal["keep", "abort"]
"""keep: running requests pause and continue after resume(). abort: they end with the tokens so far, and the server
drops all cached keys and values, which may be of another run's weights."""
LoadMode: TypeAlias = Literal["keep", "recompute"]
"""Treatment of the KV cache of running requests when weights change."""
VersionSource: TypeAlias = Path | WeightRef
"""A Hugging Face folder, or the addresses of a version's parts if the server reads manifests."""
VersionRun: TypeAlias = tuple[int, int]
"""A version, and the number of consecutive tokens that it produced."""


class ServiceError(InterlaceError):
    """The server does not answer, answers with an error, or returned an invalid result. Other engines can serve."""


class OutOfMemoryError(ServiceError):
    """The server ran out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New tokens of one request."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """Log-probs under the sampled distribution, one per token, in nats."""
    versions: Sequence[VersionRun] = ()
    """Version runs over `token_ids`; empty if the server reports versions at the end alone."""
    all_versions: Sequence[VersionRun] = ()
    """Version runs over all tokens since the request was sent, with the last delta, if `versions` was empty."""
    finish_reason: FinishReason | None = None
    """Reason of the end; None if the request continues, ABORTED if it was aborted."""
    num_cached_tokens: int = 0
    """Tokens of the context that the server did not compute again; set in the last delta."""
    refusal: str = ""
    """Reason why the server does not serve the request, which has then ended."""


OnDelta: TypeAlias = Callable[[str, Delta], None]
"""Receiver of the deltas of requests, by the id of the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceHealth:
    """State of a server that answers."""

    version: int | None
    """Version of the served weights; None if the server does not report a version."""
    is_paused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceCapacity:
    """Model and sizes of a server. If a value is None or an empty text, the server does not report it."""

    model: str = ""
    """Path or name of the model."""
    identity: str = ""
    """Text that is unique for each server, to recognize two addresses of one server."""
    vocab_size: int | None = None
    context: int | None = None
    """Length of the longest sequence, in tokens, prompt included."""
    max_running: int | None = None
    """Most sequences that decode at once."""
    dtype: str = ""
    """Data type of the weights, as torch names it."""
    seed: int | None = None
    """Seed of the sampling noise, if samples are a function of the seed and the request."""
    weight_bytes: int = 0
    kv_bytes: int = 0


class EngineClient(Protocol):
    """One engine service. All methods run on one event loop.

    Each method raises ServiceError if the server fails, and UserError if no server can serve the request.
    """

    name: str
    """Address of the server for messages."""
    wakes_awake: bool
    """True if wake() does nothing for a server that is awake; False if the server fails."""

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """Serves requests until all have ended. on_delta: called with each delta, in order for each request."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-prob of each token of each sequence under the model, at temperature 1.

        The result has one number for each token after the first of a sequence.
        """

    async def abort(self, ids: Sequence[str]) -> None:
        """Ends requests: the last delta of each has the finish reason ABORTED. Unknown ids are ignored."""

    async def pause(self, mode: PauseMode) -> None:
        """Stops decoding until resume(); requests that arrive in the meantime wait."""

    async def resume(self) -> None: ...

    async def load(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        """Replaces all weights, or keeps the old ones and raises: UserError if names or shapes do not fit the model."""

    async def health(self) -> ServiceHealth: ...

    async def capacity(self) -> ServiceCapacity: ...

    async def sleep(self) -> None:
        """Frees the devices, if the server can; no request is running."""

    async def wake(self) -> None:
        """Undoes sleep()."""

    async def close(self) -> None:
        """Closes connections; the server continues to run."""


SHARED_MEMORY = ("shared_memory",)
TRANSPORTS = (*SHARED_MEMORY, "folder", "gloo", "object_store")
"""Transports that a manifest can describe. Tensors of `object_store` are stored in files first."""


def can_write_manifest(ref: WeightRef, transports: Collection[str]) -> bool:
    """Returns True if all parts of a version are of some transports."""
    return bool(ref.parts) and not ref.adapters and all(part.transport in transports for part in ref.parts)


def write_manifest(ref: WeightRef) -> dict[str, JSON]:
    """Returns the manifest of a version. Its parts must contain no tensors."""
    parts = _adapter_of(tuple[WeightPart, ...]).dump_python(tuple(ref.parts), mode="json")
    return {"version": ref.version, "parts": parts}


def read_manifest(given: JSON) -> WeightRef:
    """Reads the output of write_manifest(). Raises UserError for anything else."""
    data: Any = given
    try:
        parts = _adapter_of(tuple[WeightPart, ...]).validate_python(data["parts"])
        return WeightRef(version=int(data["version"]), parts=tuple(_read_source(part) for part in parts))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(data)[:80]} is not the manifest of a version: {error}") from None


def list_files(ref: WeightRef) -> list[Path]:
    """Returns the files that contain the parts of a version."""
    from interlace.weights.transports.folder import FolderSource
    from interlace.weights.transports.shared_memory import SlotSource

    sources = [part.source for part in ref.parts]
    slots = [source.path for source in sources if isinstance(source, SlotSource)]
    return slots + [source.file for source in sources if isinstance(source, FolderSource)]


def _read_source(part: WeightPart) -> WeightPart:
    """Returns a part, and the earlier parts that come with it, with addresses as the transport's objects."""
    from interlace.weights.transports.folder import FolderSource
    from interlace.weights.transports.gloo import PeerSource
    from interlace.weights.transports.shared_memory import SlotSource

    types: dict[str, type] = {"shared_memory": SlotSource, "folder": FolderSource, "gloo": PeerSource}
    source = part.source  # None for a part that the server has read before
    if source is not None:
        source = _adapter_of(types[part.transport]).validate_python(source)
    return replace(part, source=source, behind=tuple(_read_source(each) for each in part.behind))


@cache
def _adapter_of(kind: Any) -> "TypeAdapter[Any]":
    return TypeAdapter(kind)


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
