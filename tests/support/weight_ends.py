"""Trainer and engine ranks in separate processes, to be killed during a transfer."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from interlace.core.errors import InterlaceError
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightPart, WeightRef
from interlace.weights.writer import WeightWriter

ANSWER_WITHIN_S = 60.0
NUM_TENSORS, ELEMENTS = 6, 1 << 18
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "tests.support.weight_ends"])  # saves 0.6 s per process


def write(pipe: Connection, config: WeightsConfig, rank: int, num_ranks: int) -> None:
    """Writes each requested version; every element is the version's number."""
    torch.set_num_threads(1)
    writer = WeightWriter(Route(transport=config.transport, config=config), rank=rank, num_ranks=num_ranks)
    while True:
        version = pipe.recv()
        tensors = {f"rank{rank}.{n}": torch.full((ELEMENTS,), float(version)) for n in range(NUM_TENSORS)}
        pipe.send(writer.write(version, tensors))


def serve(pipe: Connection) -> None:
    """Reads each version, and returns the served values, as an engine on a CPU does."""
    torch.set_num_threads(1)
    reader = WeightReader()
    version, served = -1, list[torch.Tensor]()
    while True:
        ref = pipe.recv()
        refusal = ""
        if ref is not None:
            try:
                with reader.open(ref) as read:
                    taken = list(read.values())
                    version, served = ref.version, taken
            except InterlaceError as error:
                refusal = str(error)
        bounds = {float(bound) for tensor in served for bound in tensor.aminmax()}  # sorting all would take a second
        pipe.send((version, refusal, sorted(bounds)))


class End:
    """A process, and the pipe to it."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """Returns the process's answer, or None if the process is dead. Fails if no answer arrives in time."""
        assert self.pipe.poll(ANSWER_WITHIN_S), "it hangs"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def tell(self, message: object) -> None:
        self.pipe.send(message)

    def kill(self) -> None:
        """Kills the process at once."""
        if self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(ANSWER_WITHIN_S)

    def assert_whole(self, refs: dict[int, WeightRef]) -> tuple[int, str]:
        """Returns the served version, and the reason why a newer one was refused."""
        version, refusal, values = self.answer()
        assert values == ([] if version < 0 else [float(version)]), (version, values, refusal)
        assert version < 0 or version in refs, "no part of it was missing"
        return version, refusal


def writers(config: WeightsConfig, num_ranks: int) -> list[End]:
    return [End(write, config, rank, num_ranks) for rank in range(num_ranks)]


def parts_of(ends: list[End]) -> list[WeightPart | None]:
    """Returns the part that each rank wrote, or None for a dead rank."""
    return [end.answer() for end in ends]
