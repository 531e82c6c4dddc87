"""Faults of a worker at a chosen call, for tests of a run's reaction."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from interlace.core.errors import WorkerDiedError
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.sim.cluster import RankWrapper
from interlace.runtime.worker import WorkerContext


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
