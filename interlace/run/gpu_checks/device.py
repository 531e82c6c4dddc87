"""Measured limits of the GPU: memory traffic and dense products."""

from collections.abc import Callable, Iterator

from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult

NUM_REPEATS = 10


def measure_seconds(work: Callable[[], object], repeats: int = NUM_REPEATS) -> float:
    """Returns the mean seconds of one call on the GPU, after three calls that are not counted."""
    import torch

    for _ in range(3):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def measure_device() -> DeviceSpeed:
    """Measures a copy of 4 GiB (or an eighth of the free memory) and a bfloat16 product."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    num_bytes = min(4 << 30, free // 8)
    copy_s = _measure_copy(num_bytes)
    first, second = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = measure_seconds(lambda: first @ second)
    torch.cuda.empty_cache()
    return DeviceSpeed(bytes_per_s=2 * num_bytes / copy_s, flops_per_s=2 * 8192**3 / product_s)


def _measure_copy(num_bytes: int) -> float:
    import torch

    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return measure_seconds(lambda: target.copy_(source))


def check_device(speed: DeviceSpeed) -> Iterator[GpuResult]:
    """Yields the two limits as rows."""
    yield GpuResult(name="memory traffic", value=speed.bytes_per_s / 1e12, unit="TB/s")
    yield GpuResult(name="bfloat16 product", value=speed.flops_per_s / 1e12, unit="TFLOP/s")
