"""What records a process while it works."""

from collections.abc import Callable
from typing import Protocol, TypeAlias


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
