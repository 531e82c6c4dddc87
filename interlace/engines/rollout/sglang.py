"""SGLang behind the rollout protocol. Not run here: written against SGLang's public Engine, for a machine that has it.

Needs `pip install sglang`. SGLang generates in its own processes; step() waits for the next tokens to arrive.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import Completion, FinishReason, Request
from interlace.engines.rollout.external import ExternalEngine, finish_reason, request_seed
from interlace.engines.rollout.protocol import StepOutput, SwitchMode, UpdateMode

if TYPE_CHECKING:
    from torch import Tensor

Arrival = tuple[str, list[tuple[float, int]], str | Exception | None]
"""Request id, all (log-prob, token) pairs of this submission so far, and why it ended: an exception where it failed."""


class SGLangEngine(ExternalEngine):
    """One SGLang engine. Log-probs are those at the sampling temperature."""

    name = "sglang"
    reason = "deterministic kernels are on, but not verified, and noise depends on where a request was resumed"

    def __init__(
        self, model: str | Path, *, max_running: int = 64, memory_share: float = 0.8, dtype: str = "auto", seed: int = 0
    ) -> None:
        """memory_share: of the device, for weights and KV cache. seed: of the sampling noise, one stream a request."""
        try:
            import sglang
        except ImportError as error:
            raise UserError("the sglang engine needs SGLang: pip install sglang, or use the native engine.") from error
        self._engine = sglang.Engine(
            model_path=str(model),
            dtype=dtype,
            random_seed=seed % 2**31,
            max_running_requests=max_running,
            mem_fraction_static=memory_share,
            enable_memory_saver=True,
            enable_deterministic_inference=True,
            disable_radix_cache=True,  # its keys know nothing of weight versions
        )
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        super().__init__(seed)
        self._finished: list[Completion] = []
        self._offloaded = False

    def submit(self, request: Request) -> None:
        self._live.add(request)
        self._tasks[request.id] = self._loop.create_task(self._follow(request))

    def step(self) -> StepOutput:
        new_tokens = 0
        if len(self._live) and not self._paused and not self._offloaded:
            new_tokens = self._take(self._loop.run_until_complete(self._arrivals.get())) + self._collect()
        finished, self._finished = tuple(self._finished), []
        return StepOutput(finished=finished, num_running=len(self._live), num_new_tokens=new_tokens)

    def interrupt(self) -> None:
        """Nothing to do: a step waits for the next token and no longer."""

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Completion, ...]:
        wanted = self._live.named(ids)
        manager = self._engine.tokenizer_manager
        if wanted and self._paused:
            self._control(None)  # a paused scheduler ends nothing
        for name in wanted:
            manager.abort_request(rid=name)
            if name not in manager.rid_to_state:  # SGLang has not heard of it, so it would not stop
                self._tasks[name].cancel()
        if wanted:
            self._loop.run_until_complete(
                asyncio.gather(*(self._tasks[name] for name in wanted), return_exceptions=True)
            )
        self._collect()
        self._finished += [self._end(name, "abort") for name in wanted if name in self._live]
        if wanted and self._paused:
            self._control("in_place")
        ended = tuple(one for one in self._finished if one.request.id in wanted)
        self._finished = [one for one in self._finished if one.request.id not in wanted]
        return ended

    def pause(self) -> None:
        if not self._paused:
            self._control("in_place")
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._control(None)
            self._paused = False

    def update_weights(
        self,
        tensors: "Mapping[str, Tensor]",
        version: int,
        mode: UpdateMode,
        *,
        frozen: bool = False,  # noqa: ARG002 - tensors go to SGLang's own processes
    ) -> None:
        """SGLang checks names while it loads: where it fails, a part of the weights may be new."""
        # Nothing to flush: retracted requests have given up their cache, and SGLang does not while any are queued.
        weights = list(tensors.items())
        self._swap(lambda: self._engine.update_weights_from_tensor(weights, flush_cache=False), version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """SGLang reads the folder itself, and flushes its KV cache: what runs is submitted anew with its tokens."""
        if mode == "keep":
            raise UserError("SGLang flushes its KV cache when it loads a folder: load it with mode recompute.")
        requests = self._take_out()
        try:
            self._swap(lambda: self._engine.update_weights_from_disk(str(folder)), version, mode)
        finally:
            self._submit_all(requests)

    def _swap(self, send: Callable[[], object], version: int, mode: UpdateMode) -> None:
        """Sends weights between two steps."""
        self._control("retract" if mode == "recompute" else "in_place")
        try:
            result = send()
            self._collect()  # what arrives before it goes on is of the old version
        finally:
            if not self._paused:
                self._control(None)
        if isinstance(result, tuple) and not result[0]:
            raise InterlaceError(f"SGLang refused the weights, and may hold a part of them: {result[1]}")
        self._version = version

    def onload(self) -> None:
        if self._offloaded:
            self._engine.resume_memory_occupation()
            self._offloaded = False

    def offload(self, kv: SwitchMode = "offload") -> None:  # noqa: ARG002 - there is one way
        """The KV cache goes, whatever `kv` asks: what runs is submitted anew with its tokens."""
        requests = self._take_out()
        self._engine.release_memory_occupation()
        self._offloaded = True
        self._submit_all(requests)

    def _take_out(self) -> list[Request]:
        """Aborts what is live; those that ended meanwhile are given out by the next step."""
        ended = self.abort()
        self._finished += [one for one in ended if one.finish_reason != FinishReason.ABORTED]
        return [one.resumed for one in ended if one.finish_reason == FinishReason.ABORTED]

    def _submit_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.submit(request)

    async def _follow(self, request: Request) -> None:
        """Puts all that SGLang sends of a request among the arrivals, an exception too: step() waits for arrivals."""
        reason = None
        try:
            stream = await self._engine.async_generate(
                input_ids=[*request.prompt_ids, *request.generated_ids],
                sampling_params=_sampling(request, self._seed),
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

    def _collect(self) -> int:
        """Takes what has arrived, without waiting."""
        taken = 0
        while not self._arrivals.empty():
            taken += self._take(self._arrivals.get_nowait())
        return taken

    def _take(self, arrival: Arrival) -> int:
        """Returns the number of tokens that are new."""
        name, pairs, reason = arrival
        if isinstance(reason, Exception):
            self._end(name, "abort")
            raise InterlaceError(f"SGLang failed on request {name}: {type(reason).__name__}: {reason}") from reason
        new = pairs[self._live.num_sent(name) :]
        self._live.extend(name, [token for _, token in new], [logprob for logprob, _ in new], self._version)
        if reason is not None:
            self._finished.append(self._end(name, reason))
        return len(new)

    def _end(self, name: str, reason: str) -> Completion:
        del self._tasks[name]
        return self._live.end(name, finish_reason(reason))

    def _control(self, pause: Literal["in_place", "retract"] | None) -> None:
        """Pauses generation, keeping or giving up the KV cache of what runs, or (None) lets it go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        manager = self._engine.tokenizer_manager
        if pause is None:
            self._loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))
        else:
            self._loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode=pause)))


def _sampling(request: Request, seed: int) -> dict[str, object]:
    """SGLang's own names."""
    params = request.params
    return {
        "max_new_tokens": params.max_new_tokens - len(request.generated_ids),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "stop": list(params.stop) or None,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "sampling_seed": request_seed(seed, request),
        "ignore_eos": True,
    }
