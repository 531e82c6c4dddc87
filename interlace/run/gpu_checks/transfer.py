"""Weights between two processes on one GPU: CUDA IPC, with the time of a version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult

if TYPE_CHECKING:
    from torch import Tensor

NUM_BYTES = 1 << 30


def check_transfer(speed: DeviceSpeed) -> Iterator[GpuResult]:
    """Yields the time and the equality of 1 GiB that another process maps and copies."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    source = torch.arange(NUM_BYTES // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_map_and_sum, args=(theirs,))
    process.start()
    try:
        ours.recv()  # the other process has started its CUDA context
        ours.send(reduce_tensor(source))
        found, seconds = ours.recv()
    finally:
        ours.send(None)
        process.join(30)
    yield GpuResult(
        name="CUDA IPC, 1 GiB mapped and copied", value=2 * NUM_BYTES / seconds / 1e12, unit="TB/s",
        limit=speed.bytes_per_s / 1e12, passed=found == int(source.sum()),
    )  # fmt: skip


def _map_and_sum(pipe: Connection) -> None:
    """Maps the tensor of another process, copies it, and sends its sum and the seconds."""
    import torch

    torch.zeros(1, device="cuda")
    pipe.send(None)
    rebuild, arguments = pipe.recv()
    start_s = time.perf_counter()
    mapped: Tensor = rebuild(*arguments)
    copied = mapped.clone()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start_s
    del mapped
    pipe.send((int(copied.sum()), seconds))
    pipe.recv()  # the owner keeps its tensor until then
