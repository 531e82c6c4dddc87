"""Cluster on a virtual clock: ranks are objects on the event loop, and an operation sleeps for its duration."""

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Literal

from interlace.core.errors import HangError, RemoteError, UserError, WorkerDiedError
from interlace.runtime.cluster import Cluster
from interlace.runtime.rank import Rank, RankResult, turn_of
from interlace.runtime.sim.loop import VirtualClock, virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

RankWrapper = Callable[[Rank, WorkerContext], Rank]


class InlineRank:
    """Operations of one rank on the event loop."""

    def __init__(self, worker: Worker, context: WorkerContext) -> None:
        """Makes a rank on the running VirtualLoop."""
        self._worker, self._context, self._loop = worker, context, virtual_loop()
        self._turn = asyncio.Lock()
        self._operations: dict[str, tuple[Callable[..., Any], bool]] = {}
        """Operations called so far, and whether each waits for its turn."""

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        """Runs an operation. A coroutine function may sleep; the sleep is its duration."""
        try:
            if method not in self._operations:
                turn = turn_of(self._worker, method, self._turn)
                self._operations[method] = getattr(self._worker, method), turn is self._turn
            operation, takes_turns = self._operations[method]
            if takes_turns:
                await self._turn.acquire()
            try:
                start_s = self._loop.now_s
                result = operation(*args, **kwargs)
                value = await result if isinstance(result, CoroutineType) else result
                return RankResult(value, start_s, self._loop.now_s)
            finally:
                if takes_turns:
                    self._turn.release()
        except UserError:
            raise
        except Exception as error:
            raise RemoteError(self._context.group, self._context.rank, method, traceback.format_exc()) from error

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        getattr(self._worker, method)(*args)

    async def close(self) -> None:
        self._worker.close()


class SimCluster(Cluster):
    """Cluster of simulated ranks. It must be made on a running VirtualLoop."""

    def __init__(
        self,
        devices: Sequence[Device],
        schedule: Schedule,
        *,
        hang_after_s: float,
        around: RankWrapper = lambda rank, _context: rank,
    ) -> None:
        """around: wraps each rank, for example to inject faults."""
        self._loop, self._around = virtual_loop(), around
        super().__init__(devices, schedule, hang_after_s=hang_after_s, clock=VirtualClock(self._loop))

    def _watch(self, loop_limit_s: Callable[[], float]) -> None:  # noqa: ARG002 - a LoopWatch would measure another clock
        # On a virtual clock a stall is an event that is detected exactly, so no periodic check is needed.
        self._loop.on_stall = self._resolve_stall

    def _resolve_stall(self) -> bool:
        if self.tasks.have_failed:
            return False  # the tasks of a failed run do not end
        try:
            return self.watchdog.resolve_or_raise()
        except HangError as error:
            self.fail(error)
            return True

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        try:
            rank = InlineRank(spec.factory(context), context)
        except UserError:
            raise
        except Exception as error:
            raise RemoteError(context.group, context.rank, "__init__", traceback.format_exc()) from error
        return self._around(rank, context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault in one call of a group's operation. It also applies to calls whose result is not awaited."""

    group: str
    operation: str
    call: int = 0
    """Index of the faulty call of the operation, counted from 0."""
    kind: Literal["death", "stall", "lost_message"]
    """death: the worker is gone from then on. stall: the result is late. lost_message: the result never arrives."""
    seconds: float = 0.0
    """Duration of a stall, in virtual seconds."""


Faults = Sequence[Fault]


def with_faults(faults: Faults) -> RankWrapper:
    """Returns a wrapper that injects each group's faults into its ranks."""

    def around(rank: Rank, context: WorkerContext) -> Rank:
        mine = [fault for fault in faults if fault.group == context.group]
        return FaultyRank(rank, mine) if mine else rank

    return around


class FaultyRank:
    """A rank with injected faults."""

    def __init__(self, rank: Rank, faults: Faults) -> None:
        """faults: the faults of its group."""
        self._rank, self._faults = rank, faults
        self._calls: Counter[str] = Counter()
        self._death: WorkerDiedError | None = None

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        fault = self._count_call(method)
        if self._death:
            raise self._death
        ran = await self._rank.call(method, args, kwargs)
        if self._death:  # it died during the call
            raise self._death
        if fault and fault.kind == "stall":
            await asyncio.sleep(fault.seconds)
            return ran._replace(end_s=ran.end_s + fault.seconds)
        if fault:
            await asyncio.get_running_loop().create_future()
        return ran

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Calls the rank at once, unless a fault applies. Does nothing once the worker is dead."""
        fault = self._count_call(method)
        if self._death or (fault and fault.kind == "lost_message"):
            return
        if fault:
            asyncio.get_running_loop().call_later(fault.seconds, self._rank.call_now, method, args)
        else:
            self._rank.call_now(method, args)

    async def close(self) -> None:
        await self._rank.close()

    def _count_call(self, method: str) -> Fault | None:
        """Counts a call. Returns the fault that applies to it, if any."""
        number = self._calls[method]
        self._calls[method] += 1
        fault = next((each for each in self._faults if each.operation == method and each.call == number), None)
        if fault and fault.kind == "death":
            self._death = WorkerDiedError(f"{fault.group} died while it ran {method}(), call {number} (a fault)")
        return fault
