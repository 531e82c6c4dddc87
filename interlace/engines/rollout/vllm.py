"""vLLM behind the rollout protocol. Not run here: written against vLLM's public classes, for a machine that has them.

Needs `pip install vllm`, and VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment, so that the engine core lives in this
process and live tensors reach its model without serialisation.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from interlace.core.errors import UserError
from interlace.core.types import Completion, FinishReason, Request
from interlace.engines.rollout.external import ExternalEngine, finish_reason, request_seed
from interlace.engines.rollout.protocol import StepOutput, SwitchMode, UpdateMode
from interlace.engines.rollout.saved_weights import SavedWeights

if TYPE_CHECKING:
    import vllm
    from torch import Tensor


class _LoadsWeights(Protocol):
    """A model of vLLM's."""

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]") -> object: ...


class VLLMEngine(ExternalEngine):
    """One vLLM engine, stepped by its caller. Log-probs are those after temperature and truncation."""

    name = "vllm"
    reason = "vLLM's kernels depend on the batch, and its noise on where a request was resumed"

    def __init__(
        self, model: str | Path, *, max_running: int = 64, memory_share: float = 0.9, dtype: str = "auto", seed: int = 0
    ) -> None:
        """memory_share: of the device, for weights and KV cache. seed: of the sampling noise, one stream a request."""
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise UserError(
                "VLLMEngine needs vLLM's engine core in this process, so that live tensors reach its model: set"
                " VLLM_ENABLE_V1_MULTIPROCESSING=0 before starting."
            )
        try:
            import vllm
        except ImportError as error:
            raise UserError("the vllm engine needs vLLM: pip install vllm, or use the native engine.") from error
        arguments = vllm.EngineArgs(
            model=str(model),
            dtype=dtype,
            seed=seed % 2**31,
            max_num_seqs=max_running,
            gpu_memory_utilization=memory_share,
            enable_sleep_mode=True,
            enable_prefix_caching=False,  # its keys know nothing of weight versions
            logprobs_mode="processed_logprobs",
            async_scheduling=False,  # a pass that was begun before an update would be told of after it
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        super().__init__(seed)
        self._asleep = False

    def submit(self, request: Request) -> None:
        self._live.add(request)
        try:
            self._send(request)
        except Exception:  # refused, a prompt that is too long for one: nobody will answer it
            self._live.end(request.id, FinishReason.ABORTED)
            raise

    def step(self) -> StepOutput:
        finished: list[Completion] = []
        new_tokens = 0
        if len(self._live) and not self._paused and not self._asleep:
            for output in self._engine.step():
                made = output.outputs[0]
                logprobs = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
                self._live.extend(output.request_id, made.token_ids, logprobs, self._version)
                new_tokens += len(made.token_ids)
                if output.finished:
                    finished.append(self._live.end(output.request_id, finish_reason(made.finish_reason)))
        return StepOutput(finished=tuple(finished), num_running=len(self._live), num_new_tokens=new_tokens)

    def interrupt(self) -> None:
        """Nothing to do: a step is one forward pass."""

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Completion, ...]:
        wanted = self._live.named(ids)
        self._engine.abort_request(wanted)
        return tuple(self._live.end(name, FinishReason.ABORTED) for name in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(
        self,
        tensors: "Mapping[str, Tensor]",
        version: int,
        mode: UpdateMode,
        *,
        frozen: bool = False,  # noqa: ARG002 - vLLM lays weights out its own way and so always copies
    ) -> None:
        """VLLM checks names while it loads: a wrong one can leave a part of the weights new."""
        self._swap(tensors.items(), version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """Reads one tensor at a time."""
        self._swap(SavedWeights(folder), version, mode)

    def _swap(self, weights: "Iterable[tuple[str, Tensor]]", version: int, mode: UpdateMode) -> None:
        def load(model: _LoadsWeights) -> None:
            model.load_weights(iter(weights))

        self._engine.apply_model(load)
        self._version = version
        if mode == "recompute":
            for partial in self.abort():
                self.submit(partial.resumed)

    def onload(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def offload(self, kv: SwitchMode = "offload") -> None:  # noqa: ARG002 - there is one way
        """Weights go to the host, the KV cache goes: what runs is computed anew after onload(), whatever `kv` asks."""
        partials = self.abort()
        self._engine.sleep(level=1)
        self._asleep = True
        for partial in partials:
            self.submit(partial.resumed)

    def _send(self, request: Request) -> None:
        self._engine.add_request(
            request.id,
            {"prompt_token_ids": [*request.prompt_ids, *request.generated_ids]},
            self._params(request),
        )

    def _params(self, request: Request) -> "vllm.SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        return SamplingParams(
            max_tokens=params.max_new_tokens - len(request.generated_ids),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop),
            logit_bias=dict(params.logit_bias) or None,
            seed=request_seed(self._seed, request),
            ignore_eos=True,
            logprobs=0,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.DELTA,
        )
