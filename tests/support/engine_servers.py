"""Real engine servers for tests, and a proxy for a server that misbehaves on request."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from interlace.core.tasks import LoopThread
from interlace.engines.rollout.services.process import free_port

KEY_ENV, KEY = "INTERLACE_TEST_KEY", "a key for tests"
START_S = 280.0
END_S = 20.0
"""Seconds for a server to end by SIGTERM, which ends its child processes, before it is killed."""


@contextmanager
def serve(model: str, log: Path, *settings: str, seed: int = 0) -> Iterator[str]:
    """Runs `interlace serve` in a process, and yields its address."""
    port = free_port()
    command = ["-c", "from interlace.cli.main import app; app()", "serve", model, "--port", str(port)]
    command += [f"seed={seed}", "cluster.devices=cpu:1", "cluster.threads_per_worker=1", *settings]
    with _server_process(command, port, log, {"INTERLACE_ADMIN_KEY": KEY}) as url:
        yield url


@contextmanager
def serve_vllm(model: Path, log: Path, *settings: str) -> Iterator[str]:
    """Runs vLLM's server as docs/engines.md starts it, and yields its address. model: folder with the tokenizer."""
    port = free_port()
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enable-scale-out"]
    command += ["--worker-extension-cls", "interlace.engines.rollout.services.vllm_worker.FolderWeights"]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-prefix-caching", "--no-async-scheduling"]
    command += ["--host", "127.0.0.1", "--port", str(port), *settings]
    with _server_process(command, port, log, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}) as url:
        yield url


@contextmanager
def _server_process(arguments: Sequence[str], port: int, log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Runs a server with this Python until it is no longer used, and yields its address when it answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class FaultyProxy:
    """Proxy that forwards requests to a server and causes one fault after `after` `generate` calls.

    Faults: `500`, `hang`, `cut`, `version`, `nan`.
    """

    def __init__(self, target: str, fault: str, after: int = 1) -> None:
        self.fault, self.after, self.num_faults = fault, after, 0
        self._target = target
        self._num_calls = 0
        self._loop = LoopThread("faulty proxy")
        self.url = self._loop.run(self._start())

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._session = aiohttp.ClientSession()
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        is_generate = request.path.endswith("/generate")
        self._num_calls += is_generate
        does_fault = is_generate and not self.num_faults and self._num_calls > self.after
        if does_fault:
            self.num_faults += 1
            if self.fault == "500":
                return web.Response(status=500, text="a fault")
            if self.fault == "hang":
                await asyncio.sleep(3600)
        body = await request.read()
        headers = {"Authorization": request.headers.get("Authorization", "")}
        async with self._session.request(
            request.method, f"{self._target}{request.path}", data=body, headers=headers
        ) as answer:
            if not is_generate:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            async for line in answer.content:
                content = self._spoiled(line) if does_fault else line
                await response.write(content)
                if does_fault and self.fault == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            await response.write_eof()
            return response

    def _spoiled(self, line: bytes) -> bytes:
        delta = json.loads(line)
        if self.fault == "version":
            delta["versions"] = [[99, len(delta["token_ids"])]]
        if self.fault == "nan":
            delta["logprobs"] = [float("nan")] * len(delta["token_ids"])
        return json.dumps(delta).encode() + b"\n"

    def close(self) -> None:
        """Stops listening."""

        async def end() -> None:
            await self._session.close()
            await self._runner.cleanup()

        self._loop.run(end())
        self._loop.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition that another process fulfils."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.05)
