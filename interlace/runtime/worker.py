"""What a worker is: a plain class around one thing, whose operations are its public methods."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from interlace.core.errors import InterlaceError

Method = TypeVar("Method", bound=Callable[..., Any])
Split = Literal["broadcast", "samples"]
Collect = Literal["first", "all", "concat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """How the runtime calls a method on the ranks of a group."""

    split: Split = "broadcast"
    """broadcast: every rank gets the same. samples: the first argument, a sequence, is dealt to the ranks by load."""
    collect: Collect = "first"
    """first: rank 0's result. all: a list, one a rank. concat: the ranks' sequences, back in the argument's order."""
    on_device: bool = True
    """The runtime takes the group's devices for it (lock, onload, run)."""
    concurrent: bool = False
    """May run while another operation of the same rank runs; must be thread-safe and return at once."""


_ATTRIBUTE = "_interlace_operation"
_UNDECLARED = Operation()


def operation(
    *, split: Split = "broadcast", collect: Collect = "first", on_device: bool = True, concurrent: bool = False
) -> Callable[[Method], Method]:
    """Declares how a method is called, so that the controller knows nothing of parallelism."""
    how = Operation(split=split, collect=collect, on_device=on_device, concurrent=concurrent)

    def mark(method: Method) -> Method:
        setattr(method, _ATTRIBUTE, how)
        return method

    return mark


def operation_of(worker_class: type, name: str) -> Operation | None:
    """A method's declaration; a plain public method is a broadcast on the device. None where there is none."""
    method = getattr(worker_class, name, None)
    if name.startswith("_") or not callable(method):
        return None
    declared: Operation = getattr(method, _ATTRIBUTE, _UNDECLARED)
    return declared


RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""What an operation may raise, raised again where it was called. One that exits must not take its thread along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of a group meet for torch.distributed: `init_process_group(init_method=place.url, ...)`."""

    address: str
    """Of rank 0's node."""
    port: int
    """Free there when the group was started."""

    @property
    def url(self) -> str:
        """As torch.distributed takes it."""
        return f"tcp://{self.address}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """What a rank is told of its place."""

    group: str
    rank: int
    num_ranks: int
    devices: tuple[str, ...]
    """Names of the devices it may compute on, e.g. ('cuda:0',); empty for a worker that needs none."""
    rendezvous: Rendezvous | None = None
    """Of a group of several processes; None where ranks are threads, or alone."""


class Tracer(Protocol):
    """A recording of what one process computes, on all its threads, that began when this was made."""

    def stop(self) -> bytes:
        """Ends the recording and returns it."""
        ...


class Worker:
    """Base of all workers. Constructed on the rank's own thread or process; operations run there one at a time.

    An operation that is a coroutine function runs on the event loop instead; those that need no device overlap.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._tracer: Tracer | None = None

    def onload(self) -> "Awaitable[None] | None":
        """Brings the worker's state onto its devices. Called by the runtime, never by flow code."""

    def offload(self) -> "Awaitable[None] | None":
        """Moves it off again, without losing any."""

    def memory_bytes(self) -> int:
        """What the loaded state needs of each of its devices."""
        return 0

    @operation(on_device=False)
    async def start_trace(self, make: Callable[[], Tracer]) -> None:
        """Starts recording the worker's process, beside what runs there."""
        self._tracer = await asyncio.to_thread(make)

    @operation(on_device=False)
    async def stop_trace(self) -> bytes:
        """Ends the recording and returns it."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            raise InterlaceError(f"{self.context.group}: stop_trace() without start_trace().")
        return await asyncio.to_thread(tracer.stop)

    def close(self) -> None:
        """Ends what the worker started (processes, files). Called once, after its last operation, whatever ended it."""
