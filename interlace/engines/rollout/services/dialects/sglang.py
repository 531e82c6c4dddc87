"""`sglang`: SGLang's server. Not run here, because it needs a GPU: written against the source of sglang 0.5.23."""

from collections.abc import Callable, Sequence
from typing import Any

from interlace.core.errors import UserError
from interlace.core.types import JSON, Request
from interlace.engines.rollout.external import check_penalty, finish_reason, request_seed
from interlace.engines.rollout.services.dialects.base import (
    LONG_S,
    SHORT_S,
    StreamingClient,
    list_tokens,
    read_json_chunk,
    read_spans,
    read_version,
)
from interlace.engines.rollout.services.protocol import (
    Address,
    Delta,
    LoadMode,
    OnDelta,
    PauseMode,
    ServiceCapacity,
    ServiceError,
    ServiceHealth,
    VersionSource,
)

DATA, DONE = b"data:", b"[DONE]"
BAD_REQUEST = 400
MEMORY_TAGS = ("kv_cache", "weights")


class SGLangClient(StreamingClient):
    """EngineClient of SGLang's server. Each request is one stream, whose chunks contain all tokens so far."""

    wakes_awake = False  # its scheduler ends with an error, and no route reports whether the server sleeps

    def __init__(self, address: Address, seed: int, own_stops: Sequence[int]) -> None:
        super().__init__(address, seed)
        self._own_stops = frozenset(own_stops)
        self._context: int | None = None
        """Tokens of the longest sequence that the server takes, once capacity() was called."""

    async def _follow(self, request: Request, sent_as: str, on_delta: OnDelta, on_answer: Callable[[], None]) -> bool:
        token_ids, sampling = list_tokens(request), write_sampling(request, self._seed, self._own_stops)
        if self._context is not None:  # SGLang refuses a request that may reach beyond it, which others end there
            room = max(1, self._context - len(token_ids))
            sampling["max_new_tokens"] = min(room, request.params.max_new_tokens - len(request.generated_ids))
        body: dict[str, JSON] = {
            "rid": sent_as,
            "input_ids": token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "extra_key": self._cache_key,
        }
        num_seen, has_ended = 0, False
        async for line in self._connection.lines("/generate", body, on_answer):
            if not line.startswith(DATA) or line[len(DATA) :].strip() == DONE:
                continue
            delta, num_seen = read_chunk(self.name, line[len(DATA) :], num_seen)
            has_ended = has_ended or delta.finish_reason is not None
            on_delta(request.id, delta)
        return has_ended

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        body: dict[str, JSON] = {
            "input_ids": [int(token) for token in sequence],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        found: Any = await self._connection.post("/generate", body, timeout_s=LONG_S)
        rows = found["meta_info"]["input_token_logprobs"]
        return [float(row[0]) for row in rows[1:]]

    async def abort(self, ids: Sequence[str]) -> None:
        await self._wait_for_arrival(ids)
        for name in ids:
            if name in self._sent_as:
                await self._connection.post("/abort_request", {"rid": self._sent_as[name]}, timeout_s=SHORT_S)

    async def pause(self, mode: PauseMode) -> None:
        self._is_paused = True
        named = "abort" if mode == "abort" else "in_place"
        if mode == "abort":  # a scheduler that is paused, as after a kill of the run during an update, ends no request
            await self._connection.post("/continue_generation", {}, timeout_s=SHORT_S)
        await self._connection.post("/pause_generation", {"mode": named}, timeout_s=LONG_S)
        if mode == "abort":  # the server waits some seconds for the ends of the requests
            await self._connection.post(f"/flush_cache?timeout={SHORT_S:g}", timeout_s=LONG_S)

    async def resume(self) -> None:
        await self._connection.post("/continue_generation", {}, timeout_s=SHORT_S)
        self._is_paused = False

    async def load(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        """See EngineClient. `retract` returns running requests to the queue, and their cache is computed again."""
        was_paused = self._is_paused
        named = "in_place" if mode == "keep" else "retract"
        await self._connection.post("/pause_generation", {"mode": named}, timeout_s=LONG_S)
        try:
            body: dict[str, JSON] = {
                "model_path": str(source),
                "weight_version": str(version),
                "flush_cache": mode == "recompute",
                "abort_all_requests": False,
                "keep_pause": True,
            }
            found = await self._connection.post("/update_weights_from_disk", body, timeout_s=LONG_S)
            if found.get("success") is False:
                raise ServiceError(f"{self.name} did not load version {version}: {found.get('message')}")
            self._num_loads += 1
        finally:
            if not was_paused:
                await self._connection.post("/continue_generation", {}, timeout_s=SHORT_S)

    async def health(self) -> ServiceHealth:
        """See EngineClient. SGLang's `/health` generates a token, so a paused server would not answer, a server whose
        memory is released would fail, and each answer would take a second.
        """
        await self._connection.get("/ready", timeout_s=SHORT_S)
        found = await self._connection.get("/model_info", timeout_s=SHORT_S)
        return ServiceHealth(version=read_version(found.get("weight_version")), is_paused=self._is_paused)

    async def capacity(self) -> ServiceCapacity:
        info: Any = await self._connection.get("/server_info", timeout_s=SHORT_S)
        self._context = info.get("context_length")
        return ServiceCapacity(
            model=str(info.get("model_path", "")),
            context=self._context,
            max_running=info.get("max_running_requests"),
            dtype=str(info.get("dtype") or ""),
        )

    async def sleep(self) -> None:
        await self._connection.post("/release_memory_occupation", {"tags": [*MEMORY_TAGS]}, timeout_s=LONG_S)

    async def wake(self) -> None:
        await self._connection.post("/resume_memory_occupation", {"tags": [*MEMORY_TAGS]}, timeout_s=LONG_S)


def write_sampling(request: Request, seed: int, own_stops: frozenset[int]) -> dict[str, JSON]:
    """Returns SGLang's sampling parameters. Raises UserError for parameters that SGLang does not support."""
    params = request.params
    if params.top_p < 1 or params.top_k or params.min_p:
        raise UserError(
            f"request {request.id}: SGLang gives log-probs from before top_p, top_k and min_p. Leave them at their "
            "defaults."
        )
    if params.repetition_penalty != 1:
        raise UserError(
            f"request {request.id}: SGLang's repetition_penalty leaves out the tokens of the prompt. Leave it at 1."
        )
    check_penalty(request)
    if params.stop_token_ids and not own_stops <= {*params.stop_token_ids}:
        raise UserError(
            f"request {request.id}: with any stop token, SGLang also ends a response at the model's own end tokens "
            f"{sorted(own_stops)}, and stop_token_ids are {list(params.stop_token_ids)}. Name all of them, or none."
        )
    return {
        "max_new_tokens": params.max_new_tokens - len(request.generated_ids),
        "temperature": params.temperature,
        "presence_penalty": params.presence_penalty,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "stop": list(params.stop) or None,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "sampling_seed": request_seed(seed, request),
        "ignore_eos": not params.stop_token_ids,  # with ignore_eos, SGLang ignores every stop token
    }


def read_chunk(name: str, content: bytes, num_seen: int) -> tuple[Delta, int]:
    """Reads a chunk with all tokens so far; returns the new tokens and the number of all tokens.

    Raises UserError if the server refuses the request, which it reports in a stream as an abort with a status.
    """
    meta = read_json_chunk(name, content, "meta_info")["meta_info"]
    rows = meta.get("output_token_logprobs") or ()
    reason = meta.get("finish_reason")
    if reason and reason["type"] == "abort" and reason.get("status_code") == BAD_REQUEST:
        raise UserError(f"{name} refused the request: {reason.get('message')}")
    delta = Delta(
        token_ids=[int(row[1]) for row in rows[num_seen:]],
        logprobs=[float(row[0]) for row in rows[num_seen:]],
        all_versions=read_spans(meta.get("weight_versions") or ()) if reason else (),
        finish_reason=None if reason is None else finish_reason(str(reason["type"])),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
    )
    return delta, len(rows)


def connect(address: Address, *, seed: int, own_stops: Sequence[int] = ()) -> SGLangClient:
    """See DialectModule."""
    return SGLangClient(address, seed, own_stops)
