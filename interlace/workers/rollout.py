"""The rollout role: one engine, its tokenizer, and a loop that can be interrupted."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError
from interlace.core.state_parts import KV, STATE, WEIGHTS
from interlace.core.types import Completion, Draft, FinishReason, Metrics, Progress, Request, Response, SampleKey
from interlace.engines.rollout.protocol import (
    ENGINE_PARTS,
    EngineReport,
    RolloutEngine,
    ServiceEngineProtocol,
    SwitchMode,
    TakesAdapters,
)
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Place, UpdateMode, WeightRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBundle:
    """Parts that a rollout worker is made of."""

    engine: RolloutEngine
    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]
    """Tokens that end the model's responses."""
    writes_text: bool = True
    """False where what the model answers is no text, such as numbers."""
    reader: WeightReader = field(default_factory=WeightReader)
    """Fetcher of what the engine needs of new weights."""
    decide: Callable[[bool], bool] = bool
    """Decision of an engine's first rank, of several that are called alike."""


MIN_CALL_S = 0.01
"""Minimum duration of a call, in seconds. Sequences that finish sooner wait and are returned together: a call costs its
caller as much as some decode steps of a small model."""


class RolloutWorker(Worker):
    """Server of requests; a call lasts until something is finished."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: Callable[[WorkerContext], RolloutBundle],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(context)
        self._now = now
        serving = make_engine(context)
        self._engine, self._tokenizer, self._stops = serving.engine, serving.tokenizer, serving.stop_token_ids
        self._writes_text = serving.writes_text
        self._reader, self._decide = serving.reader, serving.decide
        self._interrupted = threading.Event()
        self._streams: dict[str, int] = {}
        """Number of tokens that were handed out, of live requests that stream."""

    @operation(bin="generate")
    def serve(self, submissions: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()) -> Progress:
        """Takes requests in and out, then decodes until a sequence finishes, interrupt() comes or nothing is left.

        A request that streams ends a call with each token it gets. A call that began less than MIN_CALL_S ago goes on,
        whatever finishes. Those taken out are among the responses, with what they had. ended: samples whose next turns
        nothing is kept for any more.
        """
        start_s = self._now()
        finished = list(self._engine.abort(aborts)) if aborts else []
        if ended:
            self._engine.release(ended)
        refused = [response for response in map(self._submit, submissions) if response]
        num_new_tokens = num_preemptions = 0
        kv_use = 0.0
        while True:
            output = self._engine.step()
            num_new_tokens += output.num_new_tokens
            num_preemptions += output.num_preemptions
            kv_use = max(kv_use, output.kv_use)
            finished += output.finished
            refused += [_refusal(request, reason) for request, reason in output.refused]
            is_idle = not output.num_running + output.num_waiting
            is_over = self._interrupted.is_set() or is_idle or bool(output.lost)
            has_some = bool(finished or refused) or self._have_more(output.drawn)
            if self._decide(is_over or (has_some and self._now() - start_s >= MIN_CALL_S)):
                break
        self._interrupted.clear()
        return Progress(
            responses=(*refused, *self._decoded(finished)),
            drafts=self._drafts(output.drawn),
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            num_new_tokens=num_new_tokens,
            kv_use=kv_use,
            num_preemptions=num_preemptions,
            lost=output.lost,
        )

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Lets a serve() that runs return after its current decode step."""
        self._interrupted.set()
        self._engine.interrupt()  # the last: a step that ends on its account finds the other set

    @operation(bin="switch", phase="rollout")
    def abort(self) -> tuple[Response, ...]:
        """Ends everything and returns what there is, to be resubmitted."""
        return self._decoded(self._engine.abort())

    @operation(bin="weight_sync", parts=(WEIGHTS,), makes_activations=False)
    def update_weights(self, ref: WeightRef, mode: UpdateMode) -> None:
        """Swaps all weights between two decode steps."""
        if isinstance(self._engine, ServiceEngineProtocol):
            self._engine.pull_weights(ref, mode, self._reader)
            return
        with self._reader.open(ref) as weights:
            if ref.adapters:
                engine = cast("TakesAdapters", self._engine)  # the recipe's check sees to it
                engine.update_weights(weights, ref.version, mode, adapters=ref.adapters)
            else:
                self._engine.update_weights(weights, ref.version, mode, frozen=weights.frozen)

    @operation(on_device=False)
    def weight_place(self) -> Place:
        """Returns where the engine reads weights."""
        return Place.here()

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the model's responses, to be named in sampling parameters."""
        return self._stops

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Returns the engine's counters since the last call."""
        return self._engine.metrics()

    @operation(on_device=False)
    def health(self) -> str:
        """Returns why the engine is lost; empty if it is not."""
        return self._engine.health() if isinstance(self._engine, ServiceEngineProtocol) else ""

    @operation(on_device=False)
    def recover(self) -> str:
        """Brings a lost engine back. Returns why that failed, or an empty text."""
        return self._engine.recover() if isinstance(self._engine, ServiceEngineProtocol) else ""

    @operation(on_device=False)
    def report(self) -> EngineReport:
        """Returns what the engine found out about the model."""
        return self._engine.report()

    def onload(self, parts: Sequence[str] | None = None) -> None:
        self._engine.onload(ENGINE_PARTS if parts is None else parts)

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] | None = None) -> None:
        self._engine.offload(kv, ENGINE_PARTS if parts is None else parts)

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        memory = self._engine.memory()
        if self._engine.gives_up_parts:
            return {KV: memory.kv_cache, WEIGHTS: memory.weights}
        return {STATE: memory.weights + memory.kv_cache}

    def _submit(self, request: Request) -> Response | None:
        """Gives a request to the engine. Returns a response where the engine refuses it: its sample alone ends."""
        self._streams.pop(request.id, None)  # of one that was taken out: handed out again, from its beginning
        try:
            self._engine.submit(request)
        except UserError as error:
            return _refusal(request, str(error))
        return None

    def close(self) -> None:
        """Gives back the memory that the engine served from, and ends a server."""
        self._reader.close()
        if isinstance(self._engine, ServiceEngineProtocol):
            self._engine.close()

    def _decoded(self, completions: Sequence[Completion]) -> tuple[Response, ...]:
        for completion in completions:
            self._streams.pop(completion.request.id, None)
        return tuple(
            Response(completion=completion, text=self._text(completion.token_ids)) for completion in completions
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)) if self._writes_text else ""

    def _have_more(self, drawn: Mapping[str, Sequence[int]]) -> bool:
        return any(len(token_ids) > self._streams.get(name, 0) for name, token_ids in drawn.items())

    def _drafts(self, drawn: Mapping[str, Sequence[int]]) -> tuple[Draft, ...]:
        more = {name: token_ids for name, token_ids in drawn.items() if len(token_ids) > self._streams.get(name, 0)}
        self._streams.update((name, len(token_ids)) for name, token_ids in more.items())
        return tuple(
            Draft(request_id=name, token_ids=token_ids, text=self._text(token_ids)) for name, token_ids in more.items()
        )


def _refusal(request: Request, reason: str) -> Response:
    nothing = Completion(request=request, token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)
    return Response(completion=nothing, text="", refusal=reason)
