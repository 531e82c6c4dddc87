"""Handle of a call on a worker group, returned at once."""

import asyncio
from collections.abc import Generator
from typing import Generic, TypeVar

from interlace.core.errors import InterlaceError
from interlace.runtime.timeline import Span

T = TypeVar("T")


class Handle(Generic[T]):
    """Awaitable result of an operation on all ranks.

    Awaiting re-raises a rank's exception as RemoteError, with group, rank, method and remote traceback.
    """

    def __init__(self, task: "asyncio.Task[T]", spans: list[Span]) -> None:
        """task: named after the operation. spans: filled as the ranks begin."""
        self.task, self.spans = task, spans

    def __await__(self) -> Generator[object, None, T]:
        return self.task.__await__()

    async def wait(self, timeout_s: float) -> T:
        """Returns the result. Raises InterlaceError after `timeout_s`; the operation itself continues."""
        done, _ = await asyncio.wait({self.task}, timeout=timeout_s)
        if not done:
            raise InterlaceError(
                f"{self.task.get_name()} is not done after {timeout_s} s; it continues and can be awaited again."
            )
        return self.task.result()
