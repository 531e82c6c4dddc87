"""Train engine on a GPU: step time as MFU, memory, one FSDP rank, Liger's kernels, and equality with the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult, build_llama, count_parameters

if TYPE_CHECKING:
    from interlace.engines.train.engine import TrainEngine

GRADIENT_BOUND = 2e-2
"""Largest accepted relative difference of the loss between GPU and CPU, in float32 with TF32 products."""


def check_training(speed: DeviceSpeed) -> Iterator[GpuResult]:
    """Yields the rows of the train engine."""
    yield _check_against_cpu()
    yield from _measure_step(speed)
    yield from _check_liger()


def _samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Makes samples with the columns of a policy update; all values come from a fixed seed."""
    draw = np.random.default_rng(0)
    found = []
    for index in range(count):
        prompt = Prompt(uid=str(index), token_ids=np.array([5, 6, 7], np.int32), text="", answer="")
        segment = Segment(
            token_ids=draw.integers(3, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, -5.0, np.float32),
        )
        advantages = np.full(length, 1.0 if index % 2 else -1.0, np.float32)
        found.append(Sample(key=SampleKey(index, 0), prompt=prompt, segments=(segment,), advantages=advantages))
    return found


def _compute_loss(inputs: LossInputs) -> LossOutputs:
    """Computes the policy gradient loss without clipping."""
    import torch

    advantages_T = torch.as_tensor(inputs.advantages_T)
    ratio_T = (inputs.logprobs_T - inputs.logprobs_T.detach()).exp()
    return LossOutputs(loss_T=-ratio_T * advantages_T, metrics_T={})


def _engine(device: str, hidden: int, layers: int, dtype: str, *, liger: bool = False) -> TrainEngine:
    from interlace.engines.train.config import ActorConfig, OptimizerConfig, TrainConfig
    from interlace.engines.train.engine import TrainEngine

    actor = ActorConfig(liger=liger)
    model = build_llama(hidden=hidden, layers=layers, dtype=dtype, device="cpu")
    return TrainEngine(
        model, loss=_compute_loss, optimizer=OptimizerConfig(lr=1e-4), config=TrainConfig(actor=actor), device=device
    )


def _step_loss(engine: TrainEngine, samples: Sequence[Sample]) -> tuple[float, float]:
    """Runs one minibatch. Returns its mean log-prob before the update and the gradient norm."""
    logprobs = np.concatenate(engine.logprobs(samples))
    engine.accumulate(samples)
    metrics = engine.optimizer_step()
    return float(logprobs.mean()), float(metrics["actor/grad_norm"])


def _check_against_cpu() -> GpuResult:
    samples = _samples(4, 24, 128)
    on_cpu, on_gpu = (_step_loss(_engine(device, 128, 4, "float32"), samples) for device in ("cpu", "cuda:0"))
    gap = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(on_cpu, on_gpu, strict=True))
    return GpuResult(
        name="train step: log-prob and gradient norm against the CPU", value=gap, unit="relative",
        passed=gap <= GRADIENT_BOUND, note=f"bound {GRADIENT_BOUND}",
    )  # fmt: skip


def _measure_step(speed: DeviceSpeed) -> Iterator[GpuResult]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    engine = _engine("cuda:0", 2048, 16, "bfloat16")
    parameters = count_parameters(engine.model)
    samples = _samples(16, 1021, 32_000)
    tokens = sum(sample.num_tokens + 3 for sample in samples)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        engine.accumulate(samples)
        engine.optimizer_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    # Six operations per parameter and token: forward two, backward four. Attention adds about 2 % at this length.
    yield GpuResult(
        name="train step, 1.3B, 16 x 1024 tokens", value=6 * parameters * tokens / min(seconds) / 1e12, unit="TFLOP/s",
        limit=speed.flops_per_s / 1e12, note="the share is the MFU",
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated()
    yield GpuResult(name="train step, peak memory", value=peak / 2**30, unit="GiB")
    engine.residence.offload()  # the first move allocates page-locked memory, which later ones reuse
    engine.residence.onload()
    held = torch.cuda.memory_allocated()
    parts = engine.residence.parts
    start_s = time.perf_counter()
    engine.residence.offload()
    offload_s, left = time.perf_counter() - start_s, torch.cuda.memory_allocated()
    moved = held - left
    yield GpuResult(
        name="trainer offload", value=moved / offload_s / 1e9, unit="GB/s", passed=left <= 0.05 * held,
        note=f"{', '.join(parts)}: {moved / 2**30:.1f} GiB moved, {left / 2**20:.0f} MiB left",
    )  # fmt: skip
    start_s = time.perf_counter()
    engine.residence.onload()
    torch.cuda.synchronize()
    yield GpuResult(name="trainer onload", value=moved / (time.perf_counter() - start_s) / 1e9, unit="GB/s")
    del engine
    torch.cuda.empty_cache()


def _check_liger() -> Iterator[GpuResult]:
    import importlib.util

    if importlib.util.find_spec("liger_kernel") is None:
        yield GpuResult(name="liger", value=float("nan"), unit="", note="liger-kernel is not installed")
        return
    samples = _samples(4, 24, 128)
    plain = _step_loss(_engine("cuda:0", 128, 4, "float32"), samples)
    fused = _step_loss(_engine("cuda:0", 128, 4, "float32", liger=True), samples)
    gap = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(plain, fused, strict=True))
    yield GpuResult(name="liger against plain layers", value=gap, unit="relative", passed=gap <= GRADIENT_BOUND)
