"""Engine of this process as a service without a socket: it decodes on a thread, and its clients are coroutines."""

import asyncio
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import Completion, FinishReason, Request
from interlace.engines.rollout.protocol import RolloutEngine
from interlace.engines.rollout.services.protocol import (
    Delta,
    LoadMode,
    OnDelta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
)
from interlace.engines.rollout.services.wire import runs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
FLUSH_EVERY_S = 0.02
"""Seconds between two deltas of a request that continues. A server that dies loses at most the tokens of this time."""


class ServedEngine(RolloutEngine, Protocol):
    """An engine that can run as a service."""

    def peek(self, ids: Sequence[str]) -> tuple[Completion, ...]:
        """Returns the tokens so far of live requests, which continue. Unknown ids are ignored."""
        ...

    @property
    def model(self) -> "PreTrainedModel":
        """Returns the served model. Only the caller of this engine may run it."""
        ...


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request at the engine."""

    request: Request
    send: Callable[[Delta], None]
    """Callback on the engine's thread."""
    num_sent: int
    """Number of tokens that were sent to its client."""


class HostedEngine:
    """The client protocol over an engine in this process; close() ends the thread."""

    def __init__(
        self, engine: ServedEngine, capacity: ServiceCapacity, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """engine: from now on, only the thread of this object calls it. capacity: to be reported."""
        self.name = "the engine in this process"
        self._engine, self._now = engine, now
        memory = engine.memory()
        self._capacity = replace(
            capacity, identity=secrets.token_hex(8), weight_bytes=memory.weights, kv_bytes=memory.kv_cache
        )
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, _Ticket] = {}
        self._waiting: list[_Ticket] = []
        """Requests that arrived during a pause."""
        self._is_paused = False
        self._flushed_s = now()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine service", daemon=True)
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
            _Ticket(request, lambda delta, name=request.id: send(name, delta), len(request.generated_ids))  # type: ignore[misc]
            for request in requests
        ]
        await self._call(lambda: self._begin(tickets))
        try:
            await done
        except asyncio.CancelledError:
            self._put(lambda: self._end(left))
            raise

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from interlace.engines.rollout.services.scoring import score_sequences

        return await self._call(lambda: score_sequences(self._engine.model, sequences))

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call(lambda: self._end(ids))

    async def pause(self, mode: PauseMode) -> None:
        def stop() -> None:
            self._is_paused = True
            if mode == "abort":
                self._end([*self._tickets])

        await self._call(stop)

    async def resume(self) -> None:
        def go_on() -> None:
            self._is_paused = False
            waiting, self._waiting = self._waiting, []
            self._begin(waiting)

        await self._call(go_on)

    async def load(self, folder: Path, version: int, mode: LoadMode) -> None:
        def load() -> None:
            self._flush()  # Sends the tokens so far with their versions.
            self._engine.load(folder, version, mode)

        await self._call(load)

    async def health(self) -> ServiceHealth:
        """See EngineClient. It does not wait for the engine's thread, which may be loading weights."""
        if self._fault is not None:
            raise ServiceError(f"the engine has failed: {self._fault}")
        return ServiceHealth(version=self._engine.version, is_paused=self._is_paused)

    async def capacity(self) -> ServiceCapacity:
        return self._capacity

    async def sleep(self) -> None:
        await self._call(lambda: self._engine.offload("recompute"))

    async def wake(self) -> None:
        await self._call(self._engine.onload)

    async def close(self) -> None:
        self._commands.put(None)
        self._engine.interrupt()

    async def call(self, function: Callable[[RolloutEngine], T]) -> T:
        """Runs a function of the engine between two steps."""
        return await self._call(lambda: function(self._engine))

    async def _call(self, function: Callable[[], T]) -> T:
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
        self._put(run)
        return await answer

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.interrupt()

    def _run(self) -> None:
        """Runs commands and steps until close()."""
        while True:
            is_idle = self._is_paused or not self._tickets
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                return
            command()

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:  # noqa: BLE001 - every client gets it as the reason
            self._fault = error
            self._refuse(f"the engine failed: {type(error).__name__}: {error}")
            return
        for completion in output.finished:
            self._finish(completion)
        if output.drawn:  # Requests whose clients follow each token.
            self._send_new([*output.drawn])
        if self._now() - self._flushed_s >= FLUSH_EVERY_S:
            self._flush()

    def _refuse(self, reason: str) -> None:
        tickets, self._tickets = [*self._tickets.values(), *self._waiting], {}
        for ticket in tickets:
            ticket.send(Delta(refusal=reason))

    def _begin(self, tickets: Sequence[_Ticket]) -> None:
        if self._is_paused:
            self._waiting += tickets
            return
        for ticket in tickets:
            try:
                self._engine.submit(ticket.request)
            except (UserError, ValueError) as error:
                ticket.send(Delta(refusal=str(error)))
            else:
                self._tickets[ticket.request.id] = ticket

    def _end(self, ids: Sequence[str] | set[str]) -> None:
        """Aborts requests; each gets its last delta."""
        wanted = set(ids)
        for ticket in [one for one in self._waiting if one.request.id in wanted]:
            self._waiting.remove(ticket)
            ticket.send(Delta(finish_reason=FinishReason.ABORTED))
        for completion in self._engine.abort([name for name in ids if name in self._tickets]):
            self._finish(completion)

    def _flush(self) -> None:
        """Sends the tokens so far of all live requests."""
        self._flushed_s = self._now()
        self._send_new([*self._tickets])

    def _send_new(self, ids: Sequence[str]) -> None:
        for completion in self._engine.peek(ids):
            ticket = self._tickets[completion.request.id]
            if len(completion.token_ids) > ticket.num_sent:
                ticket.send(_delta(completion, ticket.num_sent))
                ticket.num_sent = len(completion.token_ids)

    def _finish(self, completion: Completion) -> None:
        ticket = self._tickets.pop(completion.request.id, None)
        if ticket is None:
            return
        if completion.failure:
            ticket.send(Delta(refusal=completion.failure))
            return
        last = _delta(completion, ticket.num_sent)
        ticket.send(
            replace(last, finish_reason=completion.finish_reason, num_cached_tokens=completion.num_cached_tokens)
        )


def _delta(completion: Completion, first: int) -> Delta:
    return Delta(
        token_ids=completion.token_ids[first:],
        logprobs=completion.logprobs[first:],
        versions=runs_of(completion.versions[first:]),
    )
