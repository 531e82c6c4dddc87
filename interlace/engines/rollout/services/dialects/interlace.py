"""`interlace`: the engine routes of `interlace serve`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from interlace.core.types import JSON, Request
from interlace.engines.rollout.services.dialects.base import LONG_S, SHORT_S, HttpClient
from interlace.engines.rollout.services.protocol import (
    Address,
    LoadMode,
    OnDelta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
    VersionSource,
    write_manifest,
)
from interlace.engines.rollout.services.wire import ROUTES, read_capacity, read_delta, write_request


class InterlaceClient(HttpClient):
    """EngineClient of `interlace serve`. A call sends its requests in one message and gets their deltas in a stream."""

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        arrival = asyncio.Event()
        with self._note_arrivals({request.id: arrival for request in requests}):
            await self._stream_requests(requests, on_delta, arrival)

    async def _stream_requests(self, requests: Sequence[Request], on_delta: OnDelta, arrival: asyncio.Event) -> None:
        left = {request.id for request in requests}
        body = {"requests": [write_request(request) for request in requests]}
        async for line in self._connection.lines(f"{ROUTES}/generate", body, arrival.set):
            try:
                data = json.loads(line)
            except ValueError:
                raise ServiceError(f"{self.name} cut a stream within a line: {line[:80]!r}") from None
            name, delta = read_delta(data)
            if delta.finish_reason is not None or delta.refusal:
                left.discard(name)
            on_delta(name, delta)
        if left:
            raise ServiceError(f"{self.name} ended a stream before {len(left)} requests had ended.")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        body = {"sequences": [[int(token) for token in each] for each in sequences]}
        found = await self._connection.post(f"{ROUTES}/score", body, timeout_s=LONG_S)
        return found["logprobs"]  # type: ignore[return-value]

    async def abort(self, ids: Sequence[str]) -> None:
        await self._wait_for_arrival(ids)
        await self._connection.post(f"{ROUTES}/abort", {"ids": list(ids)}, timeout_s=SHORT_S)

    async def pause(self, mode: PauseMode) -> None:
        await self._connection.post(f"{ROUTES}/pause", {"mode": mode}, timeout_s=SHORT_S)

    async def resume(self) -> None:
        await self._connection.post(f"{ROUTES}/resume", timeout_s=SHORT_S)

    async def load(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        body: dict[str, JSON] = {"version": version, "mode": mode}
        body |= {"source": str(source)} if isinstance(source, Path) else {"manifest": write_manifest(source)}
        await self._connection.post(f"{ROUTES}/load", body, timeout_s=LONG_S)

    async def health(self) -> ServiceHealth:
        found = await self._connection.post(f"{ROUTES}/health", timeout_s=SHORT_S)
        return ServiceHealth(version=int(found["version"]), is_paused=bool(found.get("is_paused")))  # type: ignore[arg-type]

    async def capacity(self) -> ServiceCapacity:
        return read_capacity(await self._connection.post(f"{ROUTES}/capacity", timeout_s=SHORT_S))

    async def sleep(self) -> None:
        await self._connection.post(f"{ROUTES}/sleep", timeout_s=LONG_S)

    async def wake(self) -> None:
        await self._connection.post(f"{ROUTES}/wake", timeout_s=LONG_S)


def connect(
    address: Address,
    *,
    seed: int,  # noqa: ARG001 - the server has its own seed
    own_stops: Sequence[int] = (),  # noqa: ARG001 - the server uses only the stop tokens of a request
) -> InterlaceClient:
    """See DialectModule."""
    return InterlaceClient(address)
