"""HTTP routes of `interlace serve` for engines: the client protocol of an engine service."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from interlace.core.errors import InterlaceError, UserError, is_full_disk
from interlace.core.types import JSON, Request
from interlace.engines.rollout.services.protocol import Delta, EngineClient, LoadMode, list_files, read_manifest
from interlace.engines.rollout.services.wire import ROUTES, read_request, write_capacity, write_delta
from interlace.runtime.http_listener import is_same_key

if TYPE_CHECKING:
    from aiohttp import web

    Answer = Callable[[Mapping[str, JSON]], Awaitable[JSON]]

INSUFFICIENT_STORAGE, OUT_OF_MEMORY = 507, 503
"""Status of a full disk, as in WebDAV, and of a server that ran out of memory."""
LARGEST_BODY = 1 << 30
"""Bytes of a request's body. The manifest of a large model on many ranks exceeds the limit of the other routes."""


class EngineRoutes:
    """Handlers of the routes. Each needs the key in the header `Authorization: Bearer KEY`."""

    def __init__(self, engine: EngineClient, key: str) -> None:
        self._engine, self._key = engine, key

    def add_to(self, app: "web.Application") -> None:
        answers: dict[str, Answer] = {
            "score": self._answer_score,
            "abort": self._answer_abort,
            "pause": self._answer_pause,
            "resume": _acknowledge(self._engine.resume),
            "load": self._answer_load,
            "health": self._answer_health,
            "capacity": self._capacity,
            "sleep": _acknowledge(self._engine.sleep),
            "wake": _acknowledge(self._engine.wake),
        }
        app.router.add_post(f"{ROUTES}/generate", self._answer_generate)
        for name, answer in answers.items():
            app.router.add_post(f"{ROUTES}/{name}", self._make_handler(answer))

    def _make_handler(self, answer: "Answer") -> "Callable[[web.Request], Awaitable[web.StreamResponse]]":
        async def handle(request: "web.Request") -> "web.StreamResponse":
            body, refused = await self._read_body(request)
            if refused is not None:
                return refused
            try:
                return _make_response(await answer(body))
            except (KeyError, TypeError, ValueError) as error:
                return _make_error_response(400, f"{request.path}: {type(error).__name__}: {error}.")
            except MemoryError as error:
                return _make_error_response(OUT_OF_MEMORY, f"out of memory: {error}")
            except (UserError, OSError) as error:
                return _make_error_response(INSUFFICIENT_STORAGE if is_full_disk(error) else 400, str(error))
            except (InterlaceError, RuntimeError) as error:  # of the engine, such as torch's lack of memory
                logging.getLogger(__name__).exception("%s failed", request.path)
                return _make_error_response(500, str(error) or type(error).__name__)

        return handle

    async def _read_body(self, request: "web.Request") -> "tuple[Mapping[str, JSON], web.Response | None]":
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not is_same_key(given, self._key):
            what = "engine routes need the administrator's key: `Authorization: Bearer KEY`."
            return {}, _make_error_response(401, what)
        content = await _read_content(request)
        if content is None:
            return {}, _make_error_response(413, f"the body is larger than {LARGEST_BODY >> 20} MiB.")
        try:
            body = json.loads(content or b"{}")
        except (ValueError, RecursionError) as error:
            return {}, _make_error_response(400, f"the body is not JSON: {error}.")
        if not isinstance(body, dict):
            return {}, _make_error_response(400, "the body is not a JSON object.")
        return body, None

    async def _answer_generate(self, request: "web.Request") -> "web.StreamResponse":
        """Streams the deltas of all requests of the body as they arrive, one JSON object per line."""
        from aiohttp import web

        body, refused = await self._read_body(request)
        if refused is not None:
            return refused
        try:
            wanted: list[Request] = [read_request(each) for each in body["requests"]]  # type: ignore[union-attr]
        except (KeyError, TypeError, ValueError) as error:
            return _make_error_response(400, f"requests: {type(error).__name__}: {error}.")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        lines: list[bytes] = []
        news = asyncio.Event()

        def on_delta(name: str, delta: Delta) -> None:
            lines.append(json.dumps(write_delta(name, delta)).encode() + b"\n")
            news.set()

        work = asyncio.create_task(self._engine.generate(wanted, on_delta))
        work.add_done_callback(lambda _: news.set())
        try:
            while not (work.done() and not lines):
                await news.wait()
                news.clear()
                content = b"".join(lines)
                lines.clear()
                if content:
                    await response.write(content)
            work.result()
        finally:
            work.cancel()  # A client that disconnects withdraws its requests.
        await response.write_eof()
        return response

    async def _answer_score(self, body: Mapping[str, JSON]) -> JSON:
        sequences = [[int(token) for token in each] for each in body["sequences"]]  # type: ignore[union-attr, arg-type]
        return {"logprobs": await self._engine.score(sequences)}

    async def _answer_abort(self, body: Mapping[str, JSON]) -> JSON:
        await self._engine.abort([str(name) for name in body["ids"]])  # type: ignore[union-attr]
        return {}

    async def _answer_pause(self, body: Mapping[str, JSON]) -> JSON:
        if (mode := body.get("mode", "keep")) not in ("keep", "abort"):
            raise UserError(f"mode {mode!r} is unknown: keep or abort.")
        await self._engine.pause(mode)
        return {}

    async def _answer_load(self, body: Mapping[str, JSON]) -> JSON:
        source = read_manifest(body["manifest"]) if "manifest" in body else Path(str(body["source"]))
        for path in [source] if isinstance(source, Path) else list_files(source):
            if not path.exists():
                raise UserError(
                    f"{path} is not on this machine: weights have to be on a disk that both sides see "
                    "(weights.transport=folder), or come over the network (weights.transport=gloo)."
                )
        version, mode = int(str(body["version"])), cast(LoadMode, body.get("mode", "recompute"))
        await self._engine.load(source, version, mode)
        return {"version": body["version"]}

    async def _answer_health(self, _: Mapping[str, JSON]) -> JSON:
        health = await self._engine.health()
        return {"version": health.version, "is_paused": health.is_paused}

    async def _capacity(self, _: Mapping[str, JSON]) -> JSON:
        return write_capacity(await self._engine.capacity())


async def _read_content(request: "web.Request") -> bytes | None:
    """Returns the body of a request; None if it exceeds LARGEST_BODY, without reading the rest."""
    if (request.content_length or 0) > LARGEST_BODY:
        return None
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > LARGEST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _acknowledge(act: Callable[[], Awaitable[None]]) -> "Answer":
    """Returns the answer {} after an act that needs nothing of the body."""

    async def answer(_: Mapping[str, JSON]) -> JSON:
        await act()
        return {}

    return answer


def _make_response(value: JSON, status: int = 200) -> "web.Response":
    from aiohttp import web

    return web.json_response(value, status=status)


def _make_error_response(status: int, message: str) -> "web.Response":
    return _make_response({"error": {"message": message}}, status)
