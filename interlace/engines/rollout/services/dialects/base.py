"""Shared parts of the dialects: connection, time limits, one stream per request, and version runs."""

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from interlace.core.errors import UserError
from interlace.core.types import JSON, Request
from interlace.engines.rollout.services.protocol import Address, Connection, Delta, OnDelta, ServiceError, VersionRun

SHORT_S, LONG_S = 10.0, 600.0
"""Seconds for an answer: of operations that only change a state, and of those that move weights or compute."""


class HttpClient:
    """Connection of an EngineClient to a server."""

    wakes_awake = True

    def __init__(self, address: Address) -> None:
        self.name = address.url
        self._connection = Connection(address)
        self._arrivals: dict[str, asyncio.Event] = {}
        """Requests that are being sent; the event is set when the server has them, or when sending has failed."""

    @contextmanager
    def _note_arrivals(self, arrivals: Mapping[str, asyncio.Event]) -> Iterator[None]:
        """Registers requests, each with its event, while the block sends them. Sets the events at the end."""
        self._arrivals.update(arrivals)
        try:
            yield
        finally:  # also of requests whose sending was cancelled before it began
            for name, arrival in arrivals.items():
                arrival.set()
                if self._arrivals.get(name) is arrival:
                    del self._arrivals[name]

    async def _wait_for_arrival(self, ids: Sequence[str]) -> None:
        """Waits until the server has the requests, because it ignores an abort of requests that it does not know.

        A message of a long context takes time to arrive, and an abort would overtake it on another connection.
        """
        for arrival in {event for name in ids if (event := self._arrivals.get(name))}:
            await arrival.wait()

    async def close(self) -> None:
        await self._connection.close()


class StreamingClient(HttpClient, ABC):
    """Part of an EngineClient that sends each request as one stream and each sequence to score as one request."""

    def __init__(self, address: Address, seed: int) -> None:
        super().__init__(address)
        self._seed = seed
        self._numbers = itertools.count()
        self._sent_as: dict[str, str] = {}
        """Id at the server of each running request; a resumed request gets a new id."""
        self._is_paused = False
        self._num_loads = 0

    @property
    def _cache_key(self) -> str:
        """Returns the key of the server's prefix cache. Entries that other weights computed have another key.

        A run may load two sets of weights with the same version number: for example, the last evaluation loads the
        weights of the last step.
        """
        return f"load {self._num_loads}"

    @abstractmethod
    async def _follow(self, request: Request, sent_as: str, on_delta: OnDelta, on_answer: Callable[[], None]) -> bool:
        """Passes on the deltas of a request, sent with the id `sent_as`. Returns whether the request has ended.

        on_answer: called when the server has the request.
        """

    @abstractmethod
    async def _score(self, sequence: Sequence[int]) -> list[float]:
        """Scores one sequence; see EngineClient.score()."""

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        arrivals = {request.id: asyncio.Event() for request in requests}
        with self._note_arrivals(arrivals):
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(self._stream_request(request, on_delta, arrivals[request.id]))

    async def _stream_request(self, request: Request, on_delta: OnDelta, arrival: asyncio.Event) -> None:
        sent_as = self._sent_as[request.id] = f"{request.id}~{next(self._numbers)}"
        try:
            if not await self._follow(request, sent_as, on_delta, arrival.set):
                raise ServiceError(f"{self.name} ended the stream of request {request.id} before its end.")
        except UserError as error:  # The other requests continue.
            on_delta(request.id, Delta(refusal=str(error)))
        finally:
            arrival.set()
            if self._sent_as.get(request.id) == sent_as:
                del self._sent_as[request.id]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [*await asyncio.gather(*map(self._score, sequences))]


def list_tokens(request: Request) -> list[JSON]:
    """Returns the tokens that a server continues: the context, and the tokens that were generated before."""
    return [*request.list_prompt(), *map(int, request.generated_ids)]


def read_json_chunk(name: str, content: bytes, key: str) -> Any:
    """Reads a chunk of a stream, which must have a key. Raises ServiceError. name: of the server, for messages."""
    try:
        chunk = json.loads(content)
    except ValueError:
        raise ServiceError(f"{name} cut a stream within a chunk: {content[:80]!r}") from None
    if key not in chunk:
        raise ServiceError(f"{name} ended a stream with an error: {str(chunk)[:300]}")
    return chunk


def read_spans(given: JSON) -> list[VersionRun]:
    """Reads the version runs of a server; a version that is not a number becomes -1, which no run serves."""
    spans: Any = given
    return [
        (-1 if (version := read_version(span["version"])) is None else version, int(span["end"]) - int(span["start"]))
        for span in spans
    ]


def read_version(text: object) -> int | None:
    """Reads the label of a version. Returns None if it is not a number."""
    return int(str(text)) if text is not None and str(text).lstrip("-").isdecimal() else None
