"""Client protocol of an engine service: a process with an address, a health state, a version and a capacity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from interlace.core.errors import InterlaceError
from interlace.core.types import FinishReason, Request
from interlace.weights.ref import WeightRef

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
