"""Engine of this process as a service without a socket: it decodes on a thread, and its clients are coroutines."""

import asyncio
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from interlace.core.errors import InterlaceError
from interlace.core.types import Request
from interlace.engines.rollout.services.hosted_requests import HostedRequest, HostedRequests
from interlace.engines.rollout.services.manifest import is_manifest, read_manifest
from interlace.engines.rollout.services.protocol import (
    Delta,
    LoadMode,
    OnDelta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
)
from interlace.weights.reader import WeightReader

if TYPE_CHECKING:
    from interlace.engines.rollout.engine import NativeEngine

T = TypeVar("T")


class HostedEngine:
    """The client protocol over an engine in this process; close() ends the thread."""

    wakes_awake = True

    def __init__(
        self, engine: "NativeEngine", capacity: ServiceCapacity, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """engine: from now on, only the thread of this object calls it. capacity: to be reported."""
        self.name = "the engine in this process"
        self._engine = engine
        memory = engine.memory()
        self._capacity = replace(
            capacity, identity=secrets.token_hex(8), weight_bytes=memory.weights, kv_bytes=memory.kv_cache
        )
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests = HostedRequests(engine, now)
        self._reader = WeightReader()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run_commands, name="engine service", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """See EngineClient. A cancelled call withdraws its requests."""
        loop, left = asyncio.get_running_loop(), {request.id for request in requests}
        done = loop.create_future()
        mail: deque[tuple[str, Delta]] = deque()

        def deliver() -> None:
            while mail:
                name, delta = mail.popleft()
                on_delta(name, delta)
                if delta.finish_reason is not None or delta.refusal:
                    left.discard(name)
            if not left and not done.done():
                done.set_result(None)

        def send(name: str, delta: Delta) -> None:
            mail.append((name, delta))
            loop.call_soon_threadsafe(deliver)

        tickets = [
            HostedRequest(request, lambda delta, name=request.id: send(name, delta), len(request.generated_ids))  # type: ignore[misc]
            for request in requests
        ]
        try:
            await self._call_function(lambda: self._requests.begin(tickets))
            await done
        except asyncio.CancelledError:
            self._put_command(lambda: self._requests.end(left))
            raise

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from interlace.engines.rollout.services.scoring import score_sequences

        return await self._call_function(lambda: score_sequences(self._engine.model, sequences))

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call_function(lambda: self._requests.end(ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._call_function(lambda: self._requests.pause(aborts=mode == "abort"))

    async def resume(self) -> None:
        await self._call_function(self._requests.resume)

    async def load(self, source: Path, version: int, mode: LoadMode) -> None:
        def load() -> None:
            self._requests.flush()  # Sends the tokens so far with their versions.
            if not is_manifest(source):
                self._engine.load(source, version, mode)
                return
            with self._reader.open(read_manifest(source)) as weights:
                self._engine.update_weights(weights, version, mode, frozen=weights.frozen)

        await self._call_function(load)

    async def health(self) -> ServiceHealth:
        """See EngineClient. It does not wait for the engine's thread, which may be loading weights."""
        if self._fault is not None:
            raise ServiceError(f"the engine has failed: {self._fault}")
        return ServiceHealth(version=self._engine.version, is_paused=self._requests.is_paused)

    async def capacity(self) -> ServiceCapacity:
        return self._capacity

    async def sleep(self) -> None:
        await self._call_function(lambda: self._engine.offload("recompute"))

    async def wake(self) -> None:
        await self._call_function(self._engine.onload)

    async def close(self) -> None:
        self._commands.put(None)
        self._engine.interrupt()

    async def _call_function(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)  # type: ignore[arg-type]
            else:
                answer.set_exception(error)

        def run() -> None:
            try:
                value, error = function(), None
            except Exception as raised:  # noqa: BLE001 - raised again at the caller
                value, error = None, raised
            loop.call_soon_threadsafe(settle, value, error)

        if self._fault is not None:
            raise InterlaceError(f"the engine has failed: {self._fault}") from self._fault
        self._put_command(run)
        return await answer

    def _put_command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.interrupt()

    def _run_commands(self) -> None:
        """Runs commands and steps until close()."""
        while True:
            try:
                command = self._commands.get(block=self._requests.is_idle)
            except queue.Empty:
                self._step_engine()
                continue
            if command is None:
                self._reader.close()
                return
            command()

    def _step_engine(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:  # noqa: BLE001 - every client gets it as the reason
            self._fault = error
            self._requests.refuse_all(f"the engine failed: {type(error).__name__}: {error}")
            return
        self._requests.deliver(output)
