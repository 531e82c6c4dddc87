"""SGLang behind the rollout protocol. Not run here: written against SGLang's public Engine, for a machine that has it.

SGLang generates in its own processes; step() waits for the next tokens to arrive.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import Completion, FinishReason, Request
from interlace.engines.rollout.config import SGLangConfig
from interlace.engines.rollout.external import ExternalEngine, Generated, finish_reason, request_seed
from interlace.engines.rollout.named_weights import NamedWeights
from interlace.engines.rollout.protocol import ENGINE_PARTS, StepOutput, SwitchMode, check_mode
from interlace.weights.ref import UpdateMode

if TYPE_CHECKING:
    from torch import Tensor

Arrival = tuple[str, list[tuple[float, int]], str | Exception | None]
"""Request id, all (log-prob, token) pairs of this submission so far, and why it ended: an exception where it failed."""
BUCKET_BYTES = 2**29
"""Bytes of tensors in one message."""


class SGLangEngine(ExternalEngine):
    """One SGLang engine. Log-probs are those at the sampling temperature, with nothing cut off."""

    gives_up_parts = True
    name = "sglang"
    reason = "deterministic kernels are on, but not verified, and noise depends on where a request was resumed"
    notes = ("bytes are not reported", "an update that fails inside SGLang may leave a part of the weights new")

    def __init__(
        self,
        folder: str | Path,
        config: SGLangConfig,
        *,
        dtype: str = "float32",
        seed: int = 0,
        own_stops: Sequence[int] = (),
    ) -> None:
        """folder: model and tokenizer as save_pretrained writes them. dtype: of weights and KV cache. seed: of the
        sampling noise, one stream a request. own_stops: tokens that end a response wherever any stop token does.
        """
        super().__init__(seed)
        try:
            import sglang
        except ImportError as error:
            raise UserError(
                f"SGLang cannot be imported: {error}. docs/rollout-engine.md says how it is installed."
            ) from error
        self._own_stops = frozenset(own_stops)
        self._engine = sglang.Engine(
            model_path=str(folder),
            dtype=dtype,
            random_seed=seed % 2**31,
            tp_size=config.tensor_parallel_size,
            max_running_requests=config.max_running,
            max_total_tokens=config.max_tokens,
            chunked_prefill_size=config.max_batch_tokens,
            mem_fraction_static=config.memory_share,
            enable_memory_saver=True,
            enable_weights_cpu_backup=True,  # else weights that leave the device are lost
            enable_deterministic_inference=True,
            disable_radix_cache=True,  # its keys know nothing of weight versions
        )
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finished: list[Completion] = []

    def _send(self, request: Request) -> None:
        sampling = _sampling(request, self._seed, self._own_stops)
        self._tasks[request.id] = self._loop.create_task(self._follow(request, sampling))

    def step(self) -> StepOutput:
        """Gives out first what ended between two steps, without waiting."""
        if not self._finished:
            return super().step()
        finished, self._finished = tuple(self._finished), []
        return StepOutput(finished=finished, num_running=len(self._live))

    def _advance(self) -> Iterable[Generated]:
        yield self._taken(self._loop.run_until_complete(self._arrivals.get()))
        while not self._arrivals.empty():
            yield self._taken(self._arrivals.get_nowait())

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Completion, ...]:
        wanted = self._live.named(ids)
        if wanted:
            self._drop(wanted)
        self._finished += [self._live.end(name, FinishReason.ABORTED) for name in wanted if name in self._live]
        ended = tuple(one for one in self._finished if one.request.id in wanted)
        self._finished = [one for one in self._finished if one.request.id not in wanted]
        return ended

    def _drop(self, names: Sequence[str]) -> None:
        manager = self._engine.tokenizer_manager
        if self._paused:
            self._control(None)  # a paused scheduler ends nothing
        for name in names:
            manager.abort_request(rid=name)
            if name not in manager.rid_to_state:  # SGLang has not heard of it, so it would not stop
                self._tasks[name].cancel()
        running = [self._tasks[name] for name in names]
        self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        self._collect()
        for name in names:
            self._tasks.pop(name, None)
        if self._paused:
            self._control("in_place")

    def pause(self) -> None:
        if not self._paused:
            self._control("in_place")
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._control(None)
            self._paused = False

    def _replace(self, weights: NamedWeights, version: int, mode: UpdateMode) -> None:
        """Replaces the weights between two steps, while SGLang's own scheduler stands still."""
        check_mode(mode)
        self._control("retract" if mode == "recompute" else "in_place")
        try:
            self._swap(weights)
            self._collect()  # what arrives before it goes on is of the old version
        finally:
            if not self._paused:
                self._control(None)
        self._version = version

    def _swap(self, weights: NamedWeights) -> None:
        """Loads the weights. SGLang checks names meanwhile: where it fails, a part of the weights may be new."""
        # Nothing to flush: retracted requests have given up their cache, and SGLang does not while any are queued.
        for bucket in _buckets(weights):
            result = self._engine.update_weights_from_tensor(bucket, flush_cache=False)
            if isinstance(result, tuple) and not result[0]:
                raise InterlaceError(f"SGLang refused the weights, and may hold a part of them: {result[1]}")

    def _wake(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._engine.resume_memory_occupation(tags=[part])

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Frees the device; the next step gives out sequences that ended while their requests were taken out."""
        if self._away.issuperset(parts):
            return
        ended = self.abort()
        self._finished += [one for one in ended if one.finish_reason != FinishReason.ABORTED]
        super().offload(kv, parts)
        for one in ended:
            if one.finish_reason == FinishReason.ABORTED:
                self.submit(one.resumed)

    def _sleep(self, parts: Sequence[str]) -> None:
        self._engine.release_memory_occupation(tags=[*parts])

    async def _follow(self, request: Request, sampling: dict[str, object]) -> None:
        """Puts all that SGLang sends of a request among the arrivals, an exception too: step() waits for arrivals."""
        reason = None
        try:
            stream = await self._engine.async_generate(
                input_ids=[*request.prompt_ids, *request.generated_ids],
                sampling_params=sampling,
                return_logprob=True,
                stream=True,
                rid=request.id,
            )
            async for chunk in stream:
                meta = chunk["meta_info"]
                pairs = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
                reason = meta["finish_reason"]
                self._arrivals.put_nowait((request.id, pairs, None if reason is None else reason["type"]))
            if reason is None:
                raise EOFError("its answer ended without a reason")
        except Exception as error:  # noqa: BLE001 - raised again by step()
            self._arrivals.put_nowait((request.id, [], error))

    def _collect(self) -> None:
        """Takes what has arrived, without waiting."""
        while not self._arrivals.empty():
            name, token_ids, logprobs, ended = self._taken(self._arrivals.get_nowait())
            self._live.extend(name, token_ids, logprobs, self._version)
            if ended is not None:
                self._finished.append(self._live.end(name, ended))

    def _taken(self, arrival: Arrival) -> Generated:
        """Leaves of an arrival what is new."""
        name, pairs, reason = arrival
        if isinstance(reason, Exception):
            del self._tasks[name]
            self._live.end(name, FinishReason.ABORTED)
            raise InterlaceError(f"SGLang failed on request {name}: {type(reason).__name__}: {reason}") from reason
        new = pairs[self._live.num_sent(name) :]
        if reason is not None:
            del self._tasks[name]
        ended = None if reason is None else finish_reason(reason)
        return name, [token for _, token in new], [logprob for logprob, _ in new], ended

    def _control(self, pause: Literal["in_place", "retract"] | None) -> None:
        """Pauses generation, keeping or giving up the KV cache of what runs, or (None) lets it go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        manager = self._engine.tokenizer_manager
        if pause is None:
            self._loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))
        else:
            self._loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode=pause)))


def _buckets(weights: NamedWeights) -> "Iterator[list[tuple[str, Tensor]]]":
    """Yields all tensors in lists of about BUCKET_BYTES: a message holds a copy of what it carries."""
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        bucket.append((name, tensor))
        if sum(one.nbytes for _, one in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _sampling(request: Request, seed: int, own_stops: frozenset[int]) -> dict[str, object]:
    """Translates to SGLang's own names. Raises UserError for what SGLang cannot keep."""
    params, what = request.params, f"request {request.id}"
    if params.top_p < 1 or params.top_k or params.min_p:
        raise UserError(
            f"{what}: SGLang gives log-probs from before top_p, top_k and min_p. Leave them at their defaults."
        )
    if params.stop_token_ids and not own_stops <= {*params.stop_token_ids}:
        raise UserError(
            f"{what}: SGLang ends a response at the model's own end tokens {sorted(own_stops)} where it heeds any stop"
            f" token, and stop_token_ids are {list(params.stop_token_ids)}. Name all of them, or none at all."
        )
    return {
        "max_new_tokens": params.max_new_tokens - len(request.generated_ids),
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "stop": list(params.stop) or None,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "sampling_seed": request_seed(seed, request),
        "ignore_eos": not params.stop_token_ids,  # with it, SGLang heeds no stop token at all
    }
