"""Engine of this process as a service without a socket: it decodes on a thread, and its clients are coroutines."""

import asyncio
import mmap
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import FinishReason, Request, Response
from interlace.engines.rollout.named_weights import NamedWeights
from interlace.engines.rollout.protocol import StepOutput
from interlace.engines.rollout.services.protocol import (
    Delta,
    LoadMode,
    OnDelta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
    VersionSource,
)
from interlace.engines.rollout.services.version_folders import is_never_changed
from interlace.engines.rollout.services.wire import runs_of
from interlace.weights.plan import ALIGNMENT
from interlace.weights.reader import WeightReader
from interlace.weights.ref import WeightRef
from interlace.weights.saved import SavedWeights

if TYPE_CHECKING:
    from interlace.engines.rollout.engine import NativeEngine

T = TypeVar("T")

FLUSH_EVERY_S = 0.02
"""Seconds between two deltas of a request that continues. A server that dies loses at most the tokens of this time."""
ATTENTION = "eager"
"""Attention that scores need, without the KV store of an engine."""


@dataclass(slots=True, eq=False)
class HostedRequest:
    """A request at the engine, and the receiver of its deltas."""

    request: Request
    send: Callable[[Delta], None]
    """Callback on the engine's thread."""
    num_sent: int
    """Number of tokens that were sent to its client."""


class HostedRequests:
    """Submits requests to the engine and sends their deltas. All methods are called on the engine's thread.

    While the requests are paused, further requests wait.
    """

    def __init__(self, engine: "NativeEngine", now: Callable[[], float] = time.monotonic) -> None:
        """now: clock, in seconds."""
        self._engine, self._now = engine, now
        self._tickets: dict[str, HostedRequest] = {}
        self._waiting: list[HostedRequest] = []
        """Requests that arrived during a pause."""
        self.is_paused = False
        self._flushed_s = now()

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing."""
        return self.is_paused or not self._tickets

    def begin(self, tickets: Sequence[HostedRequest]) -> None:
        """Submits requests to the engine. A request that the engine refuses gets the reason."""
        if self.is_paused:
            self._waiting += tickets
            return
        for ticket in tickets:
            try:
                self._engine.submit(ticket.request)
            except (UserError, ValueError) as error:
                ticket.send(Delta(refusal=str(error)))
            else:
                self._tickets[ticket.request.id] = ticket

    def end(self, ids: Sequence[str] | set[str]) -> None:
        """Aborts requests; each gets its last delta."""
        wanted = set(ids)
        for ticket in [one for one in self._waiting if one.request.id in wanted]:
            self._waiting.remove(ticket)
            ticket.send(Delta(finish_reason=FinishReason.ABORTED))
        for response in self._engine.abort([name for name in ids if name in self._tickets]):
            self._finish_request(response)

    def pause(self, *, aborts: bool) -> None:
        """Stops the requests until resume(). aborts: the running ones end, and no later one reuses their tokens."""
        self.is_paused = True
        if aborts:
            self.end([*self._tickets])
            self._engine.clear_prefixes()

    def resume(self) -> None:
        """Continues the requests, and begins those that waited."""
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        self.begin(waiting)

    def deliver(self, output: StepOutput) -> None:
        """Sends the results of one step of the engine."""
        for response in output.finished:
            self._finish_request(response)
        if output.drawn:  # Requests whose clients follow each token.
            self._send_new([*output.drawn])
        if self._now() - self._flushed_s >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Sends the tokens so far of all live requests."""
        self._flushed_s = self._now()
        self._send_new([*self._tickets])

    def refuse_all(self, reason: str) -> None:
        tickets, self._tickets = [*self._tickets.values(), *self._waiting], {}
        for ticket in tickets:
            ticket.send(Delta(refusal=reason))

    def _send_new(self, ids: Sequence[str]) -> None:
        for response in self._engine.peek(ids):
            ticket = self._tickets[response.request.id]
            if len(response.token_ids) > ticket.num_sent:
                ticket.send(_make_delta(response, ticket.num_sent))
                ticket.num_sent = len(response.token_ids)

    def _finish_request(self, response: Response) -> None:
        ticket = self._tickets.pop(response.request.id, None)
        if ticket is None:
            return
        if response.failure:
            ticket.send(Delta(refusal=response.failure))
            return
        last = _make_delta(response, ticket.num_sent)
        ticket.send(replace(last, finish_reason=response.finish_reason, num_cached_tokens=response.num_cached_tokens))


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
        self._reader = WeightReader(is_served=engine.model.device.type == "cpu")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="weights")
        """Thread of the reader, which reads one version at a time."""
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run_commands, name="engine service", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """See EngineClient. A cancelled call withdraws its requests."""
        loop, left = asyncio.get_running_loop(), {request.id for request in requests}
        done = loop.create_future()

        def deliver(name: str, delta: Delta) -> None:
            on_delta(name, delta)
            if delta.finish_reason is not None or delta.refusal:
                left.discard(name)
            if not left and not done.done():
                done.set_result(None)

        def make_ticket(request: Request) -> HostedRequest:
            def send(delta: Delta) -> None:
                loop.call_soon_threadsafe(deliver, request.id, delta)

            return HostedRequest(request, send, len(request.generated_ids))

        tickets = [make_ticket(request) for request in requests]
        try:
            await self._call_function(lambda: self._requests.begin(tickets))
            await done
        except asyncio.CancelledError:
            self._put_command(lambda: self._requests.end(left))
            raise

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call_function(lambda: score_sequences(self._engine, sequences))

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call_function(lambda: self._requests.end(ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._call_function(lambda: self._requests.pause(aborts=mode == "abort"))

    async def resume(self) -> None:
        await self._call_function(self._requests.resume)

    async def load(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        """See EngineClient. While a version is read, joined and decoded, the engine generates.

        A cancelled call loads the version in any case, so that the memory of the version before is released.
        """
        loading = self._loading.submit(self._load_version, source, version, mode)
        await asyncio.shield(asyncio.wrap_future(loading))

    def _load_version(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        """Reads a version on this thread, and loads it on the engine's."""
        with ExitStack() as reading:
            if isinstance(source, WeightRef):
                read = reading.enter_context(self._reader.open(source))
                weights, frozen = {**read}, read.frozen
                del read  # with the received parts of tensors that were joined or decoded
            else:
                stays = is_never_changed(source) and self._engine.model.device.type == "cpu"
                weights, frozen = _read_folder(self._engine.open_folder(source), stays=stays), True

            def load() -> None:
                self._requests.flush()  # Sends the tokens so far with their versions.
                with reading.pop_all():  # Its end releases the memory of the version before; after an error, of this.
                    self._engine.update_weights(weights, version, mode, frozen=frozen)

            self._send_function(load).result()

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
        await asyncio.to_thread(self._loading.shutdown)  # a version that is being read is loaded first
        self._commands.put(None)
        self._engine.interrupt()

    async def _call_function(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        # A function that was sent runs in any case.
        return await asyncio.shield(asyncio.wrap_future(self._send_function(function)))

    def _send_function(self, function: Callable[[], T]) -> "Future[T]":
        """Sends a function to the engine's thread. Raises InterlaceError if the engine has failed."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised again at the caller
                answer.set_exception(error)

        if self._fault is not None:
            raise InterlaceError(f"the engine has failed: {self._fault}") from self._fault
        self._put_command(run)
        return answer

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


def _read_folder(found: NamedWeights, *, stays: bool) -> dict[str, Tensor]:
    """Reads the weights in a folder. stays: its files are never written over, so an engine on cores serves from them.

    A copy would take memory bandwidth, for which decode steps would wait.
    """
    if not (stays and isinstance(found, SavedWeights)):
        return {name: tensor.clone() for name, tensor in found}
    weights = found.map_files()
    for name, tensor in weights.items():
        if tensor.data_ptr() % ALIGNMENT:
            weights[name] = tensor.clone()
        else:
            _touch_pages(tensor)
    return weights


def _touch_pages(tensor: Tensor) -> None:
    """Reads an element of each page of a tensor in a mapped file, so that a decode step does not wait for the page."""
    tensor.reshape(-1)[:: max(1, mmap.PAGESIZE // tensor.element_size())].clone()


def _make_delta(response: Response, first: int) -> Delta:
    return Delta(
        token_ids=response.token_ids[first:],
        logprobs=response.logprobs[first:],
        versions=runs_of(response.versions[first:]),
    )


@torch.inference_mode()
def score_sequences(engine: "NativeEngine", sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the log-prob of each token after the first, for each sequence, at temperature 1.

    Log-probs are normalized over the ids that the engine draws, as in training. The model's attention implementation is
    restored afterwards.
    """
    model, num_ids = engine.model, engine.limits.num_drawable
    served_by = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        return [_score(model, sequence, num_ids) for sequence in sequences]
    finally:
        model.set_attn_implementation(served_by)


def _score(model: PreTrainedModel, sequence: Sequence[int], num_ids: int | None) -> list[float]:
    if len(sequence) < 2:
        return []
    tokens = torch.tensor([list(sequence)], device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1, :num_ids].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    found: list[float] = logprobs.tolist()
    return found
