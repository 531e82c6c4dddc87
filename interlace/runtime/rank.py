"""Ranks of a worker group: the holder of one worker, a call of all ranks, and the services around a call."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from interlace.runtime.clock import Clock
from interlace.runtime.device_lock import DeviceLock
from interlace.runtime.timeline import Span, Timeline
from interlace.runtime.waits import WaitRegistry
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

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs a concurrent operation now, alongside the running one. There is no result."""

    async def close(self) -> None: ...


def turn_of(worker: object, method: str, turn: asyncio.Lock) -> AbstractAsyncContextManager[None]:
    """Returns the context of a coroutine operation. Operations on the device take turns; others overlap."""
    how = operation_of(type(worker), method)
    return turn if how is None or how.on_device else _NO_TURN


class Services(Protocol):
    """Services that a cluster provides to its groups."""

    clock: Clock
    timeline: Timeline
    waits: WaitRegistry
    lock: DeviceLock

    async def wait_turn(self) -> None:
        """Waits until a result may be processed, if results are processed one at a time."""


@dataclass(slots=True)
class GroupCall:
    """One operation on all ranks."""

    method: str
    how: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cause: str
    spans: list[Span] = field(default_factory=list)
