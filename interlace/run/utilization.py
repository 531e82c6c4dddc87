"""Model FLOPs of a step, and their share of the measured peak of the devices in dense matrix products (MFU)."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.core.types import Metrics
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_sessions import describe_machine
from interlace.run.recipe.config import Recipe
from interlace.schedule.placement import Device

FORWARD_FLOPS, TRAIN_FLOPS = 2, 6
"""FLOPs of a token for each parameter: a forward, and a forward with its backward. Attention scores are not counted."""
CPU_SIZE, CUDA_SIZE = 768, 8192
"""Rows and columns of the multiplied matrices."""
NUM_REPEATS = 10
PEAKS_FILE = "matmul-peaks.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationMeter:
    """Computes the model FLOPs of steps."""

    num_parameters: int
    """Parameters of the policy; tied ones count once."""
    epochs: int
    """Passes over the samples of a step."""
    peak_flops_per_s: float | None
    """Sum of the measured peaks of all devices; None if they are not known."""

    @classmethod
    def create(cls, recipe: Recipe, devices: Sequence[Device]) -> "UtilizationMeter | None":
        """Creates the meter of a run; returns None for a model that is not a language model."""
        if recipe.model.robot is not None:
            return None
        size = model_size(empty_model(recipe.model))
        pools = {device.pool for device in devices}
        peak = find_matmul_peak(recipe, devices[0]) if len(pools) == 1 else None
        total = None if peak is None else peak * len(devices)
        return cls(num_parameters=size.num_parameters, epochs=recipe.epochs, peak_flops_per_s=total)

    def measure(self, num_generated: float, num_trained: int, step_s: float) -> Metrics:
        """Returns `perf/model_flops` and, if the peak is known, `perf/mfu` of a step.

        num_generated, num_trained: tokens of the scored and of the trained samples, with their prompts.
        """
        tokens = FORWARD_FLOPS * num_generated + TRAIN_FLOPS * self.epochs * num_trained
        flops = float(self.num_parameters * tokens)
        if self.peak_flops_per_s is None or step_s <= 0:
            return {"perf/model_flops": flops}
        return {"perf/model_flops": flops, "perf/mfu": flops / (step_s * self.peak_flops_per_s)}


def find_matmul_peak(recipe: Recipe, device: Device) -> float | None:
    """Returns the FLOP/s that a product of large matrices reaches on a device; None if it cannot be measured here.

    A measurement takes less than a second on a core and is kept in model.cache_dir. None for the devices of another
    machine, for devices that are not cores or CUDA GPUs, and while another process uses the memory of the GPU.
    """
    import torch

    if recipe.cluster.backend != "local" or device.pool not in ("cpu", "cuda"):
        return None
    dtype = "bfloat16" if device.pool == "cuda" and recipe.model.dtype == "bfloat16" else "float32"
    key = f"{device.pool}/{dtype}/{describe_machine()}/torch {torch.__version__}"
    path = Path(recipe.model.cache_dir).expanduser() / PEAKS_FILE
    known = _read_peaks(path)
    if key not in known:
        try:
            peak = measure_cpu_peak() if device.pool == "cpu" else measure_cuda_peak(device.pool_index, dtype)
        except RuntimeError:  # no memory for the matrices
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written is measured again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({**known, key: peak}, indent=1))
        return peak
    return known[key]


def _read_peaks(path: Path) -> dict[str, float]:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(key): float(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


def measure_cpu_peak() -> float:
    """Measures the float32 FLOP/s of one core: the best of NUM_REPEATS products over the threads of torch."""
    import torch

    first, second = (torch.rand(CPU_SIZE, CPU_SIZE) for _ in range(2))
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(NUM_REPEATS):
            start_s = time.perf_counter()
            torch.mm(first, second)
            best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * CPU_SIZE**3 / best_s / torch.get_num_threads()


def measure_cuda_peak(index: int, dtype: str) -> float:
    """Measures the FLOP/s of a GPU in a number format."""
    import torch

    from interlace.run.gpu_checks.device import measure_seconds

    with torch.cuda.device(index):
        kind = getattr(torch, dtype)
        first, second = (torch.randn(CUDA_SIZE, CUDA_SIZE, dtype=kind, device="cuda") for _ in range(2))
        seconds = measure_seconds(lambda: torch.mm(first, second), NUM_REPEATS)
    return 2 * CUDA_SIZE**3 / seconds
