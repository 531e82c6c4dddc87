"""vLLM behind the rollout protocol. The tests run its CPU build; GPUs, and several devices an engine, are not run here.

The engine core lives in this process, so that live tensors reach its model without serialisation.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlace.core.errors import UserError
from interlace.core.types import Request
from interlace.engines.rollout.config import VLLMConfig
from interlace.engines.rollout.external import (
    ExternalEngine,
    Generated,
    finish_reason,
    request_seed,
)
from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.named_weights import NamedWeights
from interlace.engines.rollout.protocol import EngineMemory
from interlace.engines.rollout.request_checks import Limits
from interlace.models.config import ModelConfig
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.weights.saved import SavedWeights

if TYPE_CHECKING:
    import vllm
    from torch import Tensor
    from transformers import PreTrainedModel
    from vllm.config import VllmConfig

ONE_AT_A_TIME = threading.RLock()
"""vLLM's forward context is a global of the process: two engines on two threads would take it from each other."""
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
EXPECTED = {IN_PROCESS: "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment that holds where the user has set none."""
ALWAYS = {
    "enable_prefix_caching": False,  # its keys know nothing of weight versions
    "logprobs_mode": "processed_logprobs",
    "async_scheduling": False,  # a pass that was begun before an update would be reported after it
}
"""Engine arguments."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
LARGEST_BLOCK = 128
"""Tokens of a block of vLLM's KV cache, at most: what it takes on a CPU."""


class VLLMEngine(ExternalEngine):
    """One vLLM engine, stepped by its caller. Log-probs are those after temperature and truncation."""

    name = "vllm"
    reason = "vLLM's kernels depend on the batch, and its noise on where a request was resumed"

    def __init__(
        self,
        folder: str | Path,
        config: VLLMConfig,
        *,
        devices: Sequence[str] = ("cpu",),
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """folder: model and tokenizer as save_pretrained writes them. devices: as torch names them. dtype: of the
        weights and the KV cache. seed: of the sampling noise, one stream a request.
        """
        super().__init__(seed)
        for variable, value in EXPECTED.items():
            os.environ.setdefault(variable, value)
        if os.environ[IN_PROCESS] != "0":
            raise UserError(
                f"{IN_PROCESS}={os.environ[IN_PROCESS]}: live tensors reach vLLM's model only where its core runs in "
                "this process. Unset it, or set it to 0."
            )
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                f"vLLM cannot be imported: {error}. docs/rollout-engine.md says how it is installed."
            ) from error
        from vllm.platforms import current_platform

        source = ModelConfig(path=str(folder), dtype=dtype, trust_remote_code=trust_remote_code)
        model = empty_model(source)
        self._weights, saved = LiveWeights(model), SavedWeights(folder)
        self._weights.check(saved)
        self._can_sleep = bool(current_platform.is_sleep_mode_available())
        sizes = _Sizes(model, config, packed=current_platform.is_cpu())
        arguments = {
            "model": str(folder),
            "dtype": dtype,
            "seed": seed % 2**31,
            "trust_remote_code": trust_remote_code,
            "enforce_eager": current_platform.is_cpu() if config.enforce_eager is None else config.enforce_eager,
            "enable_sleep_mode": self._can_sleep,
            **sizes.arguments,
            **ALWAYS,
        }
        with ONE_AT_A_TIME, _kept_state(), _visible(devices):
            made = vllm.EngineArgs(**arguments).create_engine_config()
            _put_on(made, devices)
            self._engine = vllm.LLMEngine.from_vllm_config(made)
            found = self._engine.collective_rpc(_bytes_held)
        self._spans = len(devices) > 1
        self._memory = EngineMemory(
            weights=max([sizes.weight_bytes // config.tensor_parallel_size, *(held for held, _ in found)]),
            kv_cache=max(cache for _, cache in found),
        )
        vocab = model.config.get_text_config().vocab_size
        self._limits = Limits(
            context=sizes.longest, longest=sizes.longest, vocab_size=vocab, has_tokenizer=True, reads=None
        )
        self.notes = () if self._can_sleep else ("vLLM frees no memory on this platform when its device changes hands",)

    def _send(self, request: Request) -> None:
        self._limits.check(request)
        with ONE_AT_A_TIME:
            self._engine.add_request(
                request.id,
                {"prompt_token_ids": [*request.prompt_ids, *request.generated_ids]},
                self._params(request),
            )

    def _advance(self) -> Iterable[Generated]:
        with ONE_AT_A_TIME:
            outputs = self._engine.step()
        for output in outputs:
            made = output.outputs[0]
            logprobs = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
            ended = finish_reason(made.finish_reason) if output.finished else None
            yield output.request_id, made.token_ids, logprobs, ended

    def _drop(self, names: Sequence[str]) -> None:
        with ONE_AT_A_TIME:
            self._engine.abort_request(list(names))

    def _swap(self, weights: NamedWeights) -> None:
        """Checks first: a reload that fails half way leaves tensors without data."""
        self._weights.check(weights)
        each: Iterable[tuple[str, Tensor]] = _with_tied(weights, self._weights)
        # Not load_weights(): a CPU engine packs its matrices and drops those it read; a reload packs again.
        with ONE_AT_A_TIME:
            sent = list(each) if self._spans else each  # workers of other processes get them by pickle
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})

    def _sleep(self, parts: Sequence[str]) -> None:
        del parts  # vLLM's allocator gives up all at once
        if self._can_sleep:
            self._engine.sleep(level=1)

    def _wake(self, parts: Sequence[str]) -> None:
        del parts
        if self._can_sleep:
            self._engine.wake_up()

    def memory(self) -> EngineMemory:
        """Returns the bytes on each device, awake."""
        return self._memory

    def _params(self, request: Request) -> "vllm.SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params, done = request.params, len(request.generated_ids)
        return SamplingParams(
            max_tokens=min(params.max_new_tokens, self._limits.context - len(request.prompt_ids)) - done,
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


class _Sizes:
    """Sizes of what vLLM is asked to hold."""

    def __init__(self, model: "PreTrainedModel", config: VLLMConfig, *, packed: bool) -> None:
        """packed: matrices are copied into another layout, a tied head's too."""
        size = model_size(model)
        self.weight_bytes = sum(held.nbytes for held in model.state_dict().values()) if packed else size.weight_bytes
        self.longest = min(size.context or config.max_tokens, config.max_tokens)
        """Tokens of one sequence."""
        blocks = -(-config.max_tokens // LARGEST_BLOCK) + 1  # the first serves padding
        self.kv_bytes = blocks * LARGEST_BLOCK * size.kv_bytes_per_token // config.tensor_parallel_size
        """Bytes on each device."""
        self.arguments = {
            "tensor_parallel_size": config.tensor_parallel_size,
            "max_model_len": self.longest,
            "max_num_seqs": config.max_running,
            "max_num_batched_tokens": max(config.max_batch_tokens, config.max_running),
            "kv_cache_memory_bytes": self.kv_bytes,
        }


def _with_tied(weights: NamedWeights, model: LiveWeights) -> "Iterator[tuple[str, Tensor]]":
    """Yields a tied tensor under each of its names: a reload keeps the old packed copy of a head that is left out."""
    for name, tensor in weights:
        yield name, tensor
        for other in model.tied(name):
            if other not in weights.shapes:
                yield other, tensor


def _bytes_held(worker: Any) -> tuple[int, int]:
    """Returns bytes of weights, where vLLM measured them, and of the KV cache. worker: vLLM's own, one a device."""
    runner = worker.model_runner
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    return int(getattr(runner, "model_memory_usage", 0)), sum(storages.values())


def _put_on(made: "VllmConfig", devices: Sequence[str]) -> None:
    """Names the device of a single worker, which would take the first of its kind."""
    import torch

    if len(devices) == 1 and devices[0] != "cpu":
        made.device_config.device = torch.device(devices[0])


@contextmanager
def _visible(devices: Sequence[str]) -> "Iterator[None]":
    """Shows the processes of several workers their devices alone: each takes the one of its number."""
    held = os.environ.get(VISIBLE)
    if len(devices) > 1:
        every = held.split(",") if held else None
        numbers = [int(device.partition(":")[2]) for device in devices]
        os.environ[VISIBLE] = ",".join(every[number] if every else str(number) for number in numbers)
    try:
        yield
    finally:
        if len(devices) > 1:
            os.environ.pop(VISIBLE)
            os.environ.update({} if held is None else {VISIBLE: held})


@contextmanager
def _kept_state() -> "Iterator[None]":
    """Restores what vLLM's start changes: it seeds every generator, and makes torch.set_num_threads() do nothing."""
    import random

    import numpy as np
    import torch

    python, numpy, drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(drawn)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
