"""Workers with behaviour that only separate processes have."""

import gc
import os
import select
import signal
import subprocess
import time

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.runtime.worker import Worker, operation
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightPart, WeightRef


class Resident(Worker):
    """Knows its process."""

    @operation(on_device=False, collect="all")
    def process(self) -> int:
        return os.getpid()

    @operation(on_device=False, collect="all")
    def device_names(self) -> tuple[str, ...]:
        return self.context.devices

    @operation(on_device=False)
    def child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    @operation(on_device=False)
    def child_status(self) -> int:
        return subprocess.run(["false"], check=False).returncode

    @operation(on_device=False)
    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    @operation(on_device=False)
    def fails_with(self, processes: list[int]) -> None:
        """The last one dies, and the others fail of it."""
        if processes[-1] == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([os.pidfd_open(processes[-1])], [], [])
        raise ConnectionResetError("by peer")

    @operation(on_device=False)
    def refuses(self) -> None:
        raise UserError("batch=0 trains nothing. Set 1 or more.")

    @operation(on_device=False)
    def unspeakable(self) -> object:
        return (number for number in range(3))

    @operation(on_device=False)
    def doubled(self, values: FloatArray) -> FloatArray:
        values *= 2  # arrays arrive writable, as on threads
        return values

    @operation(on_device=False, concurrent=True)
    def nudge(self) -> None:
        raise ValueError("nudged too hard")


class HeapCounter(Worker):
    """Counts the objects that the garbage collector of its process leaves out."""

    @operation(on_device=False, collect="all")
    def count_frozen(self) -> int:
        return gc.get_freeze_count()


class PidTracer:
    """Records which process it was in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def stop(self) -> bytes:
        return str(self._process).encode()


class Trainer(Worker):
    @operation(bin="weight_sync", collect="all")
    def export_weights(self, version: int, transport: str) -> WeightPart:
        import torch

        from interlace.weights.writer import WeightWriter

        route = Route(transport=transport, config=WeightsConfig(transport=transport))
        self._writer = WeightWriter(route, rank=self.context.rank, num_ranks=self.context.num_ranks)
        tensors = {"embed": torch.full((1000, 200), float(version), dtype=torch.bfloat16), "scale": torch.tensor(2.5)}
        return self._writer.write(version, tensors)


class Engine(Worker):
    @operation(bin="weight_sync")
    def update_weights(self, ref: WeightRef) -> tuple[int, str, float, float]:
        from interlace.weights.reader import WeightReader

        with WeightReader().open(ref) as weights:
            embed = weights["embed"]
            return ref.version, str(embed.dtype), float(embed.double().mean()), float(weights["scale"])


class Mate(Worker):
    """One process of a torch.distributed group."""

    @operation(bin="train", collect="all")
    def sum_of_ranks(self) -> float:
        import torch
        from torch import distributed

        place = self.context.rendezvous
        assert place is not None
        distributed.init_process_group(
            "gloo", init_method=place.url, rank=self.context.rank, world_size=self.context.num_ranks
        )
        total = torch.tensor([float(self.context.rank + 1)])
        distributed.all_reduce(total)
        distributed.destroy_process_group()
        return total.item()


def large_array() -> FloatArray:
    return np.arange(100_000, dtype=np.float32)
