"""Ranks of a worker group: the holder of one worker, and a call of all ranks."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from interlace.runtime.timeline import Span
from interlace.runtime.worker import Operation, operation_of

_NO_TURN = nullcontext()


class RankResult(NamedTuple):
    """Result of an operation, and the interval in which the worker ran it, in the run clock's seconds."""

    value: Any
    start_s: float
    end_s: float


class Rank(Protocol):
    """Holder of one worker object: a thread, an actor, or a coroutine on a virtual clock."""

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[RankResult]:
        """Runs an operation after all earlier calls. Awaiting the result raises RemoteError."""
        ...

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs a concurrent operation now, alongside the running one. There is no result."""
        ...

    async def close(self) -> None: ...


def turn_of(worker: object, method: str, turn: asyncio.Lock) -> AbstractAsyncContextManager[None]:
    """Returns the context of a coroutine operation. Operations on the device take turns; others overlap."""
    how = operation_of(type(worker), method)
    return turn if how is None or how.on_device else _NO_TURN


@dataclass(slots=True)
class GroupCall:
    """One operation on all ranks."""

    method: str
    how: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cause: str
    spans: list[Span] = field(default_factory=list)
