"""Cluster on a virtual clock: ranks are objects on the event loop, and an operation sleeps for its duration."""

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CoroutineType
from typing import Any, Literal

from interlace.core.errors import HangError, RemoteError, UserError, WorkerDiedError
from interlace.core.progress import Progress
from interlace.runtime.cluster import Cluster
from interlace.runtime.rank import Rank, RankResult, turn_of
from interlace.runtime.sim.loop import VirtualClock, VirtualLoop, virtual_loop
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


DETECTION_S = {"kill": 0.0, "stop": 1.0}
"""Seconds until a fault is noticed: the end of a process at once, a stop at the next look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFault:
    """A signal to a process of a role."""

    name: str
    role: str
    kind: Literal["kill", "stop"]
    at_s: float
    """Virtual time from the start of the run."""
    instance: int
    """Number of the process, modulo the number of processes of the role."""


class ProcessFaults:
    """Faults of a simulated run, and what became of them."""

    def __init__(self, faults: Sequence[ProcessFault], restart_s: float) -> None:
        """restart_s: seconds for the start of a process in place of another."""
        self._faults, self._restart_s = sorted(faults, key=lambda fault: fault.at_s), restart_s
        self._ranks: dict[str, int] = {}
        """Number of processes by role."""
        self.recovered_s: dict[ProcessFault, float] = {}
        """Seconds from each fault that happened to the end of its recovery."""

    def around(self, rank: Rank, context: WorkerContext) -> Rank:
        """Wraps the ranks of the roles that have faults."""
        role = context.group.partition("/")[0]
        if not any(fault.role == role for fault in self._faults):
            return rank
        number = self._ranks.get(role, 0)
        self._ranks[role] = number + 1
        return _RestartedRank(rank, self, role, number)

    def next_fault(self, role: str, number: int) -> ProcessFault | None:
        """Returns the next fault of a process that has not happened."""
        count = self._ranks[role]
        return next(
            (
                fault
                for fault in self._faults
                if fault not in self.recovered_s and fault.role == role and fault.instance % count == number
            ),
            None,
        )

    def target(self, fault: ProcessFault) -> str:
        """Returns the name of the process that a fault struck."""
        return f"{fault.role} {fault.instance % self._ranks[fault.role]}"

    def loss_s(self, fault: ProcessFault) -> float:
        """Returns the seconds without the process."""
        return DETECTION_S[fault.kind] + self._restart_s


class _RestartedRank:
    """A rank whose process ends and starts again. An engine is lost and recovers; other calls are made again."""

    def __init__(self, rank: Rank, faults: ProcessFaults, role: str, number: int) -> None:
        self._rank, self._faults, self._role, self._number = rank, faults, role, number
        self._loop: VirtualLoop = virtual_loop()
        self._lost: ProcessFault | None = None
        """Fault by which the engine is lost."""

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        """Calls the rank; a fault in the meantime costs the call."""
        if self._role != "rollout":
            return await self._repeat_call(method, args, kwargs)
        if method == "recover":
            return await self._recover_engine()
        if method == "serve" and not self._lost:
            return await self._serve_until_fault(args, kwargs)
        return await self._rank.call(method, args, kwargs)

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        self._rank.call_now(method, args)

    async def close(self) -> None:
        await self._rank.close()

    async def _serve_until_fault(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        fault, timer = self._faults.next_fault(self._role, self._number), None
        if fault and fault.at_s <= self._loop.now_s:
            self._rank.call_now("interrupt", ())
        elif fault:
            timer = asyncio.get_running_loop().call_later(
                fault.at_s - self._loop.now_s, self._rank.call_now, "interrupt", ()
            )
        ran = await self._rank.call("serve", args, kwargs)
        if timer:
            timer.cancel()
        if fault is None or fault.at_s > self._loop.now_s:
            return ran
        self._lost = fault
        progress: Progress = ran.value
        return ran._replace(value=replace(progress, lost=f"its process got {fault.kind} (a fault)"))

    async def _recover_engine(self) -> RankResult:
        start_s, fault = self._loop.now_s, self._lost
        if fault:
            await asyncio.sleep(self._faults.loss_s(fault))
            self._faults.recovered_s[fault] = self._loop.now_s - fault.at_s
            self._lost = None
        ran = await self._rank.call("recover", (), {})
        return ran._replace(start_s=start_s)

    async def _repeat_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        start_s = self._loop.now_s
        fault = self._faults.next_fault(self._role, self._number)
        if fault and fault.at_s <= start_s:  # it happened while the process was idle
            await self._wait_for_restart(fault, 0.0)
            fault = self._faults.next_fault(self._role, self._number)
        ran = await self._rank.call(method, args, kwargs)
        if fault and fault not in self._faults.recovered_s and fault.at_s <= self._loop.now_s:
            await self._wait_for_restart(fault, self._loop.now_s - start_s)
        return ran._replace(start_s=start_s, end_s=self._loop.now_s)

    async def _wait_for_restart(self, fault: ProcessFault, again_s: float) -> None:
        """Waits for the next process, and as long as a call takes again."""
        self._faults.recovered_s[fault] = 0.0  # now, so that calls at the same time do not suffer it too
        loss_s = self._faults.loss_s(fault)
        await asyncio.sleep(loss_s + again_s)
        self._faults.recovered_s[fault] = loss_s
