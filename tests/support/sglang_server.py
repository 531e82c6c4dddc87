"""Stand-in for SGLang's server: its routes over the native engine, with the states of sglang 0.5.23.

SGLang is a tokenizer process, which holds new requests back during a pause, and a scheduler process, which generates.
A mode of a pause other than `abort` stops the scheduler too. A stopped scheduler ends no request.
"""

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from interlace.core.types import FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.kinds.base import ServerSite
from interlace.engines.rollout.kinds.sglang import SGLangKind
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.process import ServerCommand
from interlace.engines.rollout.services.protocol import Delta, ServiceCapacity
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model

LAUNCHER = "sglang.launch_server"
"""Module that starts SGLang."""
POLL_S = 0.02
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


class StandInKind(SGLangKind):
    """Engines of SGLang, with the stand-in as their servers: `rollout.engine=tests.support.sglang_server:StandInKind`.

    Their devices are cores.
    """

    def absence(self, pool: str) -> str | None:
        del pool
        return None

    def command(self, server: ServerSite) -> ServerCommand:
        command = super().command(server)
        arguments = [__name__ if each == LAUNCHER else each for each in command.arguments]
        return ServerCommand(arguments=arguments, environment=command.environment)


class StandIn:
    """The routes of one server."""

    def __init__(self, folder: str, *, context: int | None = None, key: str = "", max_tokens: int = 4096) -> None:
        native = NativeEngine(load_model(ModelConfig(path=folder)).model, config=NativeConfig(max_tokens=max_tokens))
        self._engine = HostedEngine(native, ServiceCapacity())
        self._folder, self._context, self._key = folder, context, key
        self._version = "default"
        self._numbers = itertools.count()
        self._running: dict[str, str] = {}
        """Requests at the scheduler: by SGLang's `rid`, the name at the native engine."""
        self._is_paused = self._is_held = self._is_asleep = False
        self._has_ended = False
        """True once the scheduler has failed, with which SGLang ends."""

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._check_key])
        app.add_routes(
            [
                web.get("/ready", _answer_empty),
                web.get("/health", self._check_health),
                web.get("/model_info", self._describe_model),
                web.get("/server_info", self._describe_server),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._resume),
                web.post("/flush_cache", self._flush),
                web.post("/update_weights_from_disk", self._load),
                web.post("/release_memory_occupation", self._sleep),
                web.post("/resume_memory_occupation", self._wake),
            ]
        )
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self._has_ended:
            return web.Response(status=500, text="the scheduler ended")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _check_health(self, request: web.Request) -> web.Response:
        """Generates a token, as SGLang does. A pause thus delays the answer, and released memory ends the server."""
        del request
        while self._is_paused or self._is_held:
            await asyncio.sleep(POLL_S)
        self._use_device()
        return web.Response()

    async def _describe_model(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"model_path": self._folder, "weight_version": self._version})

    async def _describe_server(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"model_path": self._folder, "context_length": self._context, "dtype": "float32"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        while self._is_paused:
            await asyncio.sleep(POLL_S)
        self._use_device()
        if body.get("logprob_start_len") == 0:
            return await self._score(body["input_ids"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        task = asyncio.create_task(self._run_request(body, deltas))
        meta: dict[str, Any] = {"output_token_logprobs": [], "finish_reason": None}
        spans: list[dict[str, Any]] = []
        try:
            while meta["finish_reason"] is None:
                self._add_delta(meta, spans, await deltas.get())
                await response.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        finally:  # a client that has gone aborts its request, which a stopped scheduler does later
            if not task.done():
                asyncio.create_task(self._abort_later(task))  # noqa: RUF006 - it ends with the server
        return response

    def _add_delta(self, meta: dict[str, Any], spans: list[dict[str, Any]], delta: Delta) -> None:
        """Adds new tokens to the message of a chunk, which contains all tokens so far."""
        assert not delta.refusal, delta.refusal
        pairs = zip(delta.logprobs, delta.token_ids, strict=True)
        meta["output_token_logprobs"] += [[float(logprob), int(token), None] for logprob, token in pairs]
        for version, count in delta.versions:
            start = spans[-1]["end"] if spans else 0
            label = "default" if self._version == "default" else str(version)
            spans.append({"version": label, "start": start, "end": start + count})
        if delta.finish_reason is not None:
            meta["finish_reason"] = {"type": REASONS[delta.finish_reason]}
            meta["weight_versions"] = spans
            meta["cached_tokens"] = delta.num_cached_tokens

    async def _run_request(self, body: dict[str, Any], deltas: "asyncio.Queue[Delta]") -> None:
        sampling, number = body["sampling_params"], next(self._numbers)
        params = SamplingParams(
            max_new_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            stop_token_ids=tuple(sampling["stop_token_ids"] or ()),
        )
        asked = Request(
            uid=str(sampling["sampling_seed"]),
            owner=SampleKey(number, 0),
            prompt_ids=body["input_ids"],
            params=params,
        )
        self._running[body["rid"]] = asked.id
        try:
            await self._engine.generate([asked], lambda _, delta: deltas.put_nowait(delta))
        finally:
            del self._running[body["rid"]]

    async def _abort_later(self, task: "asyncio.Task[None]") -> None:
        while self._is_held:
            await asyncio.sleep(POLL_S)
        task.cancel()

    async def _score(self, token_ids: Sequence[int]) -> web.Response:
        [logprobs] = await self._engine.score([token_ids])
        pairs = zip([None, *logprobs], token_ids, strict=True)
        rows = [[logprob, token, None] for logprob, token in pairs]
        return web.json_response({"meta_info": {"input_token_logprobs": rows}})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self._running and not self._is_held:
            await self._engine.abort([self._running[rid]])
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        self._is_paused = True
        if mode == "abort":
            while self._running:
                if not self._is_held:
                    await self._engine.abort([*self._running.values()])
                await asyncio.sleep(POLL_S)
        else:
            self._is_held = True
            await self._engine.pause("keep")
        return web.json_response({"status": "ok"})

    async def _resume(self, request: web.Request) -> web.Response:
        del request
        self._is_paused = self._is_held = False
        await self._engine.resume()
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        deadline_s = asyncio.get_running_loop().time() + float(request.query.get("timeout", "0"))
        while self._running:
            if asyncio.get_running_loop().time() > deadline_s:
                return web.Response(status=400, text="Timed out waiting for idle state.")
            await asyncio.sleep(POLL_S)
        await self._engine.pause("abort")
        if not self._is_held:
            await self._engine.resume()
        return web.Response(text="Cache flushed.")

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._use_device()
        mode = "recompute" if body["flush_cache"] else "keep"
        await self._engine.load(Path(body["model_path"]), int(body["weight_version"]), mode)
        self._version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _sleep(self, request: web.Request) -> web.Response:
        del request
        if self._running:
            self._end()
        self._is_asleep = True
        return web.Response()

    async def _wake(self, request: web.Request) -> web.Response:
        del request
        if not self._is_asleep:
            self._end()
        self._is_asleep = False
        return web.Response()

    def _use_device(self) -> None:
        if self._is_asleep:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        raise web.HTTPInternalServerError(text="the scheduler ended")


async def _answer_empty(request: web.Request) -> web.Response:
    del request
    return web.Response()


def main() -> None:
    """Serves with the arguments of SGLang's server that the stand-in uses."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    given, _ = parser.parse_known_args()
    server = StandIn(
        given.model_path, context=given.context_length, key=given.api_key, max_tokens=given.max_total_tokens
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    web.run_app(server.make_app(), host="127.0.0.1", port=given.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
