"""Deaths and stops of processes at times of the virtual clock, from which a run recovers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from interlace.core.progress import Progress
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.sim.loop import VirtualLoop, virtual_loop
from interlace.runtime.worker import WorkerContext

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
