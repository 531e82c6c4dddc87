"""Weights between two processes on one GPU: a version of 1 GiB through the transport `cuda_ipc`."""

import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult
from interlace.weights.codecs.base import Parcel, Piece, TensorEntry
from interlace.weights.ref import WeightPart
from interlace.weights.transports.cuda_ipc import IpcReceiver, IpcSender

NUM_BYTES = 1 << 30


def check_transfer(speed: DeviceSpeed) -> Iterator[GpuResult]:
    """Yields the speed of a version's sender, and of a receiver in another process that maps and copies it."""
    import torch

    source = torch.arange(NUM_BYTES // 4, dtype=torch.int32, device="cuda")
    parcel = Parcel(entries={"weight": TensorEntry("int32", (len(source),))}, tensors=[source], codec="raw")
    sender = IpcSender()
    sender.send(parcel, 0, copy=True)  # the first one allocates
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    sent = sender.send(parcel, 1, copy=True)
    send_s = time.perf_counter() - start_s
    part = WeightPart(
        version=1,
        rank=0,
        shards=(),
        transport="cuda_ipc",
        codec="raw",
        source=sent.source,
        checksum=sent.checksum,
        chain_hash=sent.checksum,
    )
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,))
    process.start()
    try:
        ours.recv()  # the other process has started its CUDA context
        ours.send(part)
        found, receive_s = ours.recv()
    finally:
        ours.send(None)
        process.join(30)
        sender.close()
    yield GpuResult(
        name="CUDA IPC, 1 GiB copied and hashed by the sender", value=NUM_BYTES / send_s / 1e9, unit="GB/s",
    )  # fmt: skip
    yield GpuResult(
        name="CUDA IPC, 1 GiB mapped and copied by a receiver", value=2 * NUM_BYTES / receive_s / 1e12, unit="TB/s",
        limit=speed.bytes_per_s / 1e12, passed=found == int(source.sum()),
    )  # fmt: skip


def _receive(pipe: Connection) -> None:
    """Maps the version of another process, copies it, and sends its sum and the seconds."""
    import torch

    torch.zeros(1, device="cuda")
    pipe.send(None)
    part = pipe.recv()
    start_s = time.perf_counter()
    lease = IpcReceiver().open(part, [Piece("weight", None)])
    copied = lease.tensors[0].clone()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start_s
    lease.close()
    pipe.send((int(copied.sum()), seconds))
    pipe.recv()  # the owner keeps its tensor until then
