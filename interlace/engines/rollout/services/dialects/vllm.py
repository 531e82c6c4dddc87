"""`vllm`: vLLM's server with its routes for reinforcement learning (`--enable-scale-out`, VLLM_SERVER_DEV_MODE=1)."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError
from interlace.core.types import JSON, Request
from interlace.engines.rollout.external import check_penalty, finish_reason, request_seed
from interlace.engines.rollout.kinds import LOW_TEMPERATURE
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
    ServiceHealth,
    VersionSource,
    write_manifest,
)

ID_PREFIX = "generate-tokens-"
"""Prefix that vLLM's route adds to the id of a request."""
DATA, DONE = b"data: ", b"[DONE]"


class VLLMClient(StreamingClient):
    """EngineClient of vLLM's server. Each request is one stream."""

    async def _follow(self, request: Request, sent_as: str, on_delta: OnDelta, on_answer: Callable[[], None]) -> bool:
        body: dict[str, JSON] = {
            "request_id": sent_as,
            "token_ids": list_tokens(request),
            "sampling_params": self._write_sampling(request),
            "cache_salt": self._cache_key,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        cached, last = 0, None
        async for line in self._connection.lines("/inference/v1/generate", body, on_answer):
            deltas, cached = _read_line(self.name, line, cached)
            last = _pass_on(request.id, deltas, on_delta) or last
        if last is not None:
            on_delta(request.id, replace(last, num_cached_tokens=cached))  # the count follows the last token
        return last is not None

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        body: dict[str, JSON] = {
            "token_ids": [int(token) for token in sequence],
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            "cache_salt": self._cache_key,
        }
        found: Any = await self._connection.post("/inference/v1/generate", body, timeout_s=LONG_S)
        each = found.get("prompt_logprobs")
        if not each:
            raise UserError(f"{self.name} gave no log-probs of given tokens (prompt_logprobs): it cannot score.")
        return [float(row[str(token)]["logprob"]) for row, token in zip(each[1:], sequence[1:], strict=True)]

    async def abort(self, ids: Sequence[str]) -> None:
        await self._wait_for_arrival(ids)
        names: list[JSON] = [f"{ID_PREFIX}{self._sent_as[name]}" for name in ids if name in self._sent_as]
        if names:
            await self._connection.post("/inference/v1/abort_requests", {"request_ids": names}, timeout_s=SHORT_S)

    async def pause(self, mode: PauseMode) -> None:
        self._is_paused = True
        clears = "true" if mode == "abort" else "false"
        await self._connection.post(f"/pause?mode={mode}&clear_cache={clears}", timeout_s=LONG_S)

    async def resume(self) -> None:
        await self._connection.post("/resume", timeout_s=SHORT_S)
        self._is_paused = False

    async def load(self, source: VersionSource, version: int, mode: LoadMode) -> None:
        """See EngineClient. Decoding pauses in the meantime; the caller resubmits requests for mode `recompute`."""
        del mode
        was_paused = self._is_paused
        if not was_paused:
            await self.pause("keep")
        try:
            body: dict[str, JSON] = (
                {"method": "load_folder", "args": [str(source)]}
                if isinstance(source, Path)
                else {"method": "load_manifest", "args": [json.dumps(write_manifest(source))]}
            )
            await self._connection.post("/collective_rpc", body, timeout_s=LONG_S)
            await self._connection.post("/update_weight_version", {"new_version": str(version)}, timeout_s=SHORT_S)
            self._num_loads += 1
        finally:
            if not was_paused:
                await self.resume()

    async def health(self) -> ServiceHealth:
        await self._connection.get("/health", timeout_s=SHORT_S)
        found = await self._connection.get("/weight_info", timeout_s=SHORT_S)
        return ServiceHealth(version=read_version(found.get("weight_version")), is_paused=self._is_paused)

    async def capacity(self) -> ServiceCapacity:
        models: Any = await self._connection.get("/v1/models", timeout_s=LONG_S)
        [model] = [each for each in models["data"] if not each.get("parent")][:1] or [{}]
        info = await self._connection.get("/server_info", timeout_s=LONG_S)
        dtype = re.search(r"dtype=torch\.(\w+)", str(info.get("vllm_config", "")))
        name = str(model.get("root") or model.get("id") or "")
        found: Any = await self._connection.post("/collective_rpc", {"method": "count_bytes"}, timeout_s=LONG_S)
        sizes = found.get("results") or [[0, 0]]
        if (await self.health()).version is None:  # a server names the weights that it started with `default`
            await self._connection.post("/update_weight_version", {"new_version": "0"}, timeout_s=LONG_S)
        return ServiceCapacity(
            model=name,
            vocab_size=_vocab_size(name),
            context=model.get("max_model_len"),
            dtype=dtype.group(1) if dtype else "",
            weight_bytes=max(int(weights) for weights, _ in sizes),
            kv_bytes=max(int(cache) for _, cache in sizes),
        )

    async def sleep(self) -> None:
        await self._connection.post("/sleep?level=1", timeout_s=LONG_S)

    async def wake(self) -> None:
        await self._connection.post("/wake_up", timeout_s=LONG_S)

    def _write_sampling(self, request: Request) -> dict[str, JSON]:
        params, done = request.params, len(request.generated_ids)
        check_penalty(request)
        if 0 < params.temperature < LOW_TEMPERATURE:
            raise UserError(
                f"request {request.id}: vLLM samples at temperature {LOW_TEMPERATURE:g} instead of "
                f"{params.temperature:g}. Set it to {LOW_TEMPERATURE:g} or more, or to 0."
            )
        bias = {str(token): _limit_bias(added) for token, added in params.logit_bias}
        return {
            "max_tokens": params.max_new_tokens - done,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "logit_bias": bias or None,
            "seed": request_seed(self._seed, request),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": bool(params.stop),
            "skip_special_tokens": False,  # a stop string may be a special token, such as <|im_end|>
        }


def _limit_bias(bias: float) -> float:
    """Returns a bias that JSON can represent and that no logit outweighs."""
    return bias if math.isfinite(bias) else -1e30


def _read_line(name: str, line: bytes, cached: int) -> tuple[list[Delta], int]:
    """Reads a line of a stream. Returns its deltas, and the known number of cached tokens."""
    if not line.startswith(DATA) or line[len(DATA) :].startswith(DONE):
        return [], cached
    chunk = read_json_chunk(name, line[len(DATA) :], "choices")
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = max(cached, int(details.get("cached_tokens") or 0))
    return [_read_choice(name, choice, cached) for choice in chunk["choices"]], cached


def _pass_on(name: str, deltas: Sequence[Delta], on_delta: OnDelta) -> Delta | None:
    """Calls on_delta with all deltas except the last one of a request, which is returned."""
    last = None
    for delta in deltas:
        if delta.finish_reason is None:
            on_delta(name, delta)
        else:
            last = delta
    return last


def _read_choice(name: str, choice: Mapping[str, Any], cached: int) -> Delta:
    """Reads new tokens. Only the last chunk contains version runs, over all tokens since the request was sent."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    token_ids = choice.get("token_ids") or ()
    if len(content) != len(token_ids):
        raise UserError(
            f"{name} gives {len(content)} log-probs for {len(token_ids)} token ids: it cannot be trained on."
        )
    reason = choice.get("finish_reason")
    spans = choice.get("weight_versions") or ()
    return Delta(
        token_ids=token_ids,
        logprobs=[float(entry["logprob"]) for entry in content],
        all_versions=read_spans(spans),
        finish_reason=None if reason is None else finish_reason(reason),
        num_cached_tokens=cached,
    )


def _vocab_size(model: str) -> int | None:
    """Reads the vocabulary's size if the server's model is a folder of this machine."""
    file = Path(model) / "config.json"
    if not model or not file.is_file():
        return None
    config = json.loads(file.read_text())
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return None if size is None else int(size)


def connect(address: Address, *, seed: int, own_stops: Sequence[int] = ()) -> VLLMClient:  # noqa: ARG001 - SGLang's
    """See DialectModule."""
    return VLLMClient(address, seed)
