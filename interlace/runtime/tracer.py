"""What records a process while it works."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from interlace.core.errors import WorkerDiedError


class Tracer(Protocol):
    """Records what one process computes, on all its threads, beside whatever runs there."""

    def start(self) -> None:
        """Returns when it records."""
        ...

    def stop(self) -> bytes:
        """Ends it and returns the recording."""
        ...


MakeTracer: TypeAlias = Callable[[], Tracer]
"""Called in each process; picklable for a cluster of processes."""


class WorkerProcess(Protocol):
    """Another process of the run, seen from the controller."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool:
        """Whether it is still there."""
        ...

    async def death(self) -> WorkerDiedError | None:
        """Why it is gone, once that is found out; None where it is there, or was ended."""
        ...

    async def start_trace(self, make: MakeTracer) -> None: ...

    async def stop_trace(self) -> bytes: ...
