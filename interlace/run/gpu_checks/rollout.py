"""Native rollout engine on a GPU: parity with transformers, decode speed, offload and onload."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlace.core.types import Response, SamplingParams
from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult, build_llama, count_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from interlace.engines.rollout.engine import NativeEngine

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 40]
NUM_TOKENS = 32
BATCHES = (1, 32, 256)
DECODE_TOKENS = 64
PARITY_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest accepted gap between log-probs of the engine and of one forward of transformers. The bfloat16 bound is the
spread of bfloat16 sums in another order on random weights."""


def check_rollout(speed: DeviceSpeed) -> Iterator[GpuResult]:
    """Yields parity in two types, decode speed at three batch sizes, and the moves between GPU and host."""
    for dtype, bound in PARITY_NATS.items():
        yield _check_parity(dtype, bound)
    model = build_llama(hidden=2048, layers=16, dtype="bfloat16", device="cuda")
    yield from _measure_decode(model, speed)


def _check_parity(dtype: str, bound: float) -> GpuResult:
    import torch

    from interlace.engines.rollout.config import NativeConfig
    from interlace.engines.rollout.engine import NativeEngine

    model = build_llama(hidden=128, layers=4, dtype=dtype, device="cuda")
    reference = build_llama(hidden=128, layers=4, dtype=dtype, device="cuda")
    engine = NativeEngine(model, config=NativeConfig(max_running=8, max_tokens=4096))
    responses = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NUM_TOKENS))
    gap = max(_measure_gap(reference, response) for response in responses)
    report = engine.report()
    del engine
    torch.cuda.empty_cache()
    return GpuResult(
        name=f"log-prob gap to transformers, {dtype}", value=gap, unit="nats", passed=gap <= bound,
        note=f"bound {bound}; attention: {report.attention}",
    )  # fmt: skip


def _measure_gap(model: PreTrainedModel, response: Response) -> float:
    """Returns the largest difference between the engine's log-probs and those of one forward over the sequence."""
    import torch

    prompt, drawn = list(response.request.prompt_ids), list(response.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + drawn], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(drawn, device="cuda")[:, None])[:, 0].cpu()
    return float((expected - torch.tensor(response.logprobs)).abs().max())


def _measure_decode(model: PreTrainedModel, speed: DeviceSpeed) -> Iterator[GpuResult]:
    from interlace.engines.rollout.config import NativeConfig
    from interlace.engines.rollout.engine import NativeEngine

    weight_bytes = 2 * count_parameters(model)
    # Without drafts, each step draws one token per sequence, and the same tokens come before and after a move.
    config = NativeConfig(max_running=max(BATCHES), max_tokens=128 * max(BATCHES), draft_tokens=0)
    engine = NativeEngine(model, config=config)
    rates = dict[int, float]()
    for batch in BATCHES:
        rate = rates[batch] = _measure_rate(engine, batch)
        # A step reads every weight once and draws one token per sequence; the copy's traffic bounds the reads.
        limit = batch * min(speed.bytes_per_s / weight_bytes, speed.flops_per_s / weight_bytes / batch)
        yield GpuResult(name=f"decode, batch {batch}", value=rate, unit="tokens/s", limit=limit)
    yield from _measure_moves(engine)
    kept = _measure_rate(engine, BATCHES[0]) / rates[BATCHES[0]]
    yield GpuResult(
        name=f"decode after an onload / before, batch {BATCHES[0]}", value=kept, unit="", passed=kept >= 0.7,
        note="CUDA graphs are captured again",
    )  # fmt: skip


def _measure_rate(engine: NativeEngine, batch: int) -> float:
    """Returns the tokens per second of a batch, after one warm-up."""
    import torch

    prompts = [[3 + index % 1000, 7, 9] for index in range(batch)]
    params = SamplingParams(max_new_tokens=DECODE_TOKENS)
    engine.generate(prompts, params)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    responses = engine.generate(prompts, params)
    return sum(len(response.token_ids) for response in responses) / (time.perf_counter() - start_s)


def _measure_moves(engine: NativeEngine) -> Iterator[GpuResult]:
    import torch

    before = engine.generate([[3, 7, 9]], SamplingParams(max_new_tokens=8))[0].token_ids
    held, num_bytes = torch.cuda.memory_allocated(), engine.memory().weights
    times = {}
    engine.offload()  # the first move allocates page-locked memory, which later ones reuse
    engine.onload()
    for name, move in (("offload", engine.offload), ("onload", engine.onload)):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        move()
        torch.cuda.synchronize()
        times[name] = time.perf_counter() - start_s
        if name == "offload":
            freed = held - torch.cuda.memory_allocated()
    after = engine.generate([[3, 7, 9]], SamplingParams(max_new_tokens=8))[0].token_ids
    for name, seconds in times.items():
        yield GpuResult(name=f"engine {name}", value=num_bytes / seconds / 1e9, unit="GB/s", passed=before == after)
    memory = engine.memory()
    expected = memory.weights + memory.kv_cache
    yield GpuResult(
        name="memory freed by offload / ledger", value=freed / expected, unit="", passed=0.9 <= freed / expected <= 1.1,
        note=f"ledger: {expected / 2**20:.0f} MiB",
    )  # fmt: skip
