"""The rollout role: one engine, its tokenizer, and a loop that can be interrupted."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError
from interlace.core.payload import PayloadStore, StoredColumn
from interlace.core.progress import Draft, Progress
from interlace.core.state_parts import KV, STATE, WEIGHTS
from interlace.core.types import FinishReason, Metrics, Request, Response, SampleKey, SamplingParams
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
    """Parts of a rollout worker."""

    engine: RolloutEngine
    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]
    """Tokens that end the model's responses."""
    writes_text: bool = True
    """False if the model's answers are not text, such as numbers."""
    reader: WeightReader = field(default_factory=WeightReader)
    """Reader of the parts of new weights that the engine needs."""
    decide: Callable[[bool], bool] = bool
    """Replaces a decision by the decision of the engine's first rank, if several ranks make the same calls."""


MIN_CALL_S = 0.01
"""Minimum duration of a call, in seconds. Sequences that finish sooner are returned together: a call costs its caller
as much as several decode steps of a small model."""
CALL_GAPS, MAX_CALL_S = 10, 0.5
"""Minimum duration of a call as a multiple of the time between two calls, in which the engine waits, and its limit in
seconds. They apply if that time exceeds MIN_CALL_S, as the round trip to a distant machine does. A shorter time costs
less than later responses would."""
NUM_GAPS = 8
"""Number of last gaps of which the shortest counts; a longer one may contain work of other roles on the device."""


@dataclass(slots=True)
class _Stream:
    """A request that streams."""

    params: SamplingParams
    num_sent: int = 0
    """Tokens that were returned as drafts."""


class CallLength:
    """Minimum duration of the calls of one engine, from the time between them."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)
        self._left_s: float | None = None
        """End of the last call, if it left sequences in the engine."""

    def begin(self, now_s: float) -> float:
        """Records the start of a call. Returns its minimum duration, in seconds."""
        if self._left_s is not None:
            self._gaps_s.append(now_s - self._left_s)
        gap_s = min(self._gaps_s) if len(self._gaps_s) == NUM_GAPS else 0.0
        return min(CALL_GAPS * gap_s, MAX_CALL_S) if gap_s > MIN_CALL_S else MIN_CALL_S

    def end(self, now_s: float, *, has_more: bool) -> None:
        """Records the end of a call. has_more: True if sequences are left in the engine."""
        self._left_s = now_s if has_more else None


class ResponseDecoder:
    """Decodes the tokens of one engine, and tracks the drafts of requests that stream."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_token_ids: Sequence[int],
        *,
        writes_text: bool,
        payloads: PayloadStore | None = None,
        is_first_rank: bool = True,
    ) -> None:
        """stop_token_ids: tokens that end the model's responses. writes_text: False if its answers are not text.

        payloads: keeps the tokens and texts of responses. If None, the responses contain them. is_first_rank: False on
        a rank that shares an engine with the first rank: both finish the same sequences, and only the first responds.
        """
        self._tokenizer, self._writes_text = tokenizer, writes_text
        self._payloads, self._is_first_rank = payloads, is_first_rank
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        added = self._special | set(getattr(tokenizer, "added_tokens_decoder", ()))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        self._hidden = {getattr(tokenizer, name, None) for name in names} | (added & set(stop_token_ids))
        """Tokens that the text of a response leaves out: the beginning, the end, and padding."""
        self._streams: dict[str, _Stream] = {}
        """Live requests that stream, by id."""

    def begin(self, request: Request) -> None:
        """Records a request that is submitted to the engine."""
        if request.streams:
            self._streams[request.id] = _Stream(request.params)

    def decode(self, responses: Sequence[Response]) -> tuple[Response, ...]:
        """Adds the text to the responses of requests that have ended, or stores their content."""
        for response in responses:
            self._streams.pop(response.request.id, None)
        return tuple([self._add_text(response) for response in responses]) if self._is_first_rank else ()

    def _add_text(self, response: Response) -> Response:
        text = self.decode_text(response.token_ids, response.request.params)
        may_stay = response.request.may_stay and response.finish_reason != FinishReason.ABORTED
        if self._payloads and may_stay and (stored := self._payloads.put_sample(response.segments, text)):
            ids, logprobs = (StoredColumn(stored, name) for name in ("token_ids", "logprobs"))
            return replace(response, token_ids=ids, logprobs=logprobs, versions=stored.versions)
        return replace(response, text=text)

    def have_more(self, drawn: Mapping[str, Sequence[int]]) -> bool:
        """Returns whether a request has tokens that no draft contained. drawn: all tokens by the request's id."""
        return any(self._has_new(name, token_ids) for name, token_ids in drawn.items())

    def take_drafts(self, drawn: Mapping[str, Sequence[int]]) -> tuple[Draft, ...]:
        """Makes the drafts of the requests that have more tokens than their last draft. drawn: see have_more()."""
        found = []
        for name, token_ids in drawn.items():
            if self._has_new(name, token_ids):
                stream = self._streams[name]
                stream.num_sent = len(token_ids)
                found.append(
                    Draft(request_id=name, token_ids=token_ids, text=self.decode_text(token_ids, stream.params))
                )
        return tuple(found)

    def decode_text(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        """Decodes a response without the tokens that end or pad it. Other special tokens stay, such as tags."""
        if not self._writes_text:
            return ""
        hidden = self._hidden | (self._special & set(params.stop_token_ids))
        shown = [token for token in token_ids if token not in hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def _has_new(self, name: str, token_ids: Sequence[int]) -> bool:
        stream = self._streams.get(name)
        return stream is not None and len(token_ids) > stream.num_sent


class RolloutWorker(Worker):
    """Serves requests with one engine. A call lasts until a request finishes."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: Callable[[WorkerContext], RolloutBundle],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(context)
        self._now = now
        serving = make_engine(context)
        self._engine, self._stops = serving.engine, serving.stop_token_ids
        self._service = serving.engine if isinstance(serving.engine, ServiceEngineProtocol) else None
        self._decoder = ResponseDecoder(
            serving.tokenizer,
            serving.stop_token_ids,
            writes_text=serving.writes_text,
            payloads=context.open_payload_store(),
            is_first_rank=context.rank == 0,
        )
        self._reader, self._decide = serving.reader, serving.decide
        self._interrupted = threading.Event()
        self._expected: WeightRef | None = None
        """Version that expect_weights() announced, until update_weights() begins."""
        self._length = CallLength()

    @operation(bin="generate")
    def serve(self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()) -> Progress:
        """Adds and removes requests, then decodes until a sequence finishes, interrupt() is called or none is left.

        A request that streams ends a call with each of its tokens, but a call lasts at least MIN_CALL_S, and longer if
        the caller is on a distant machine (see CallLength). The responses include the removed requests, with their
        tokens so far. ended: samples that request no further turn.
        """
        start_s = self._now()
        least_s = self._length.begin(start_s)
        finished = list(self._engine.abort(aborts)) if aborts else []
        if ended:
            self._engine.release(ended)
        finished += [refused for refused in map(self._submit_request, requests) if refused]
        num_new_tokens = num_preemptions = 0
        kv_use = 0.0
        while True:
            output = self._engine.step()
            num_new_tokens += output.num_new_tokens
            num_preemptions += output.num_preemptions
            kv_use = max(kv_use, output.kv_use)
            finished += output.finished
            is_idle = not output.num_running + output.num_waiting
            is_over = self._interrupted.is_set() or is_idle or bool(output.lost)
            now_s = self._now()
            has_some = bool(finished) and now_s - start_s >= least_s
            has_drafts = self._decoder.have_more(output.drawn) and now_s - start_s >= MIN_CALL_S
            if self._decide(is_over or has_some or has_drafts):
                break
        self._interrupted.clear()
        self._length.end(now_s, has_more=not is_idle)
        return Progress(
            responses=self._decoder.decode(finished),
            drafts=self._decoder.take_drafts(output.drawn),
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            num_new_tokens=num_new_tokens,
            kv_use=kv_use,
            num_preemptions=num_preemptions,
            lost=output.lost,
        )

    @operation(on_device=False, concurrent=True)
    def interrupt(self) -> None:
        """Makes a running serve() return after its current decode step."""
        self._interrupted.set()
        self._engine.interrupt()  # last: a step that it ends finds the flag set

    @operation(on_device=False, concurrent=True)
    def expect_weights(self, ref: WeightRef) -> None:
        """Fetches a version from its store while serve() runs, which then returns, so that update_weights() is called.

        Between machines, a fetch takes several round trips.
        """
        self._expected = ref
        threading.Thread(target=self._fetch_weights, args=(ref,), name="weights", daemon=True).start()

    def _fetch_weights(self, ref: WeightRef) -> None:
        with contextlib.suppress(Exception):  # update_weights() raises the error
            ref.fetch()
        if self._expected is ref:
            self.interrupt()

    @operation(bin="switch", phase="rollout")
    def abort(self) -> tuple[Response, ...]:
        """Ends all requests and returns their tokens so far, to be resubmitted."""
        return self._decoder.decode(self._engine.abort())

    @operation(bin="weight_sync", parts=(WEIGHTS,), makes_activations=False)
    def update_weights(self, ref: WeightRef, mode: UpdateMode) -> None:
        """Swaps all weights between two decode steps."""
        expected, self._expected = self._expected, None  # `expected` keeps the fetched content until the swap ends
        if expected is not None:
            self._interrupted.clear()  # an interruption by expect_weights() has no further purpose
        if self._service:
            self._service.pull_weights(ref, mode, self._reader)
            return
        with self._reader.open(ref) as weights:
            if ref.adapters:
                engine = cast("TakesAdapters", self._engine)  # the recipe's check ensures it
                engine.update_weights(weights, ref.version, mode, adapters=ref.adapters)
            else:
                self._engine.update_weights(weights, ref.version, mode, frozen=weights.frozen)

    @operation(on_device=False)
    def weight_place(self) -> Place:
        """Returns the location from which the engine reads weights."""
        return self._service.weight_place() if self._service else Place.here()

    @operation(on_device=False)
    def stop_token_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end the model's responses."""
        return self._stops

    @operation(on_device=False)
    def engine_metrics(self) -> Metrics:
        """Returns the engine's metrics since the last call."""
        return self._engine.metrics()

    @operation(on_device=False)
    def health(self) -> str:
        """Returns the reason why the engine is lost, or an empty text."""
        return self._service.health() if self._service else ""

    @operation(on_device=False)
    def recover(self) -> str:
        """Restores a lost engine. Returns the reason if that failed, else an empty text.

        Does nothing if the engine is not lost: a rank in place of a dead one has just started or adopted its server.
        """
        return self._service.recover() if self._service and self._service.health() else ""

    @operation(on_device=False)
    def report(self) -> EngineReport:
        """Returns the engine's report about the loaded model."""
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

    def _submit_request(self, request: Request) -> Response | None:
        """Gives a request to the engine. Returns a response if the engine refuses it: only its sample fails."""
        self._decoder.begin(request)
        try:
            self._engine.submit(request)
        except UserError as error:
            return Response(
                request=request,
                token_ids=(),
                logprobs=(),
                versions=(),
                finish_reason=FinishReason.ABORTED,
                failure=str(error),
            )
        return None

    def close(self) -> None:
        """Releases the memory of the engine's weights, and ends a server."""
        self._reader.close()
        if self._service:
            self._service.close()
