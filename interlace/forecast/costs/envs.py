"""Simulators on the virtual clock, whose operations only take time."""

import heapq
from collections.abc import Sequence

import numpy as np

from interlace.forecast.costs.pace import Pace
from interlace.forecast.profile.types import EnvCosts
from interlace.rollouts.envs.jobs import EnvBatch, EnvCounts, SlotAnswer, SlotChunk, SlotJob
from interlace.rollouts.envs.spec import ActionSpec, EnvSpec
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation

ROLE = "env"
_ONE = np.zeros(1, np.float32)
_SPEC = EnvSpec(
    observation={}, action=ActionSpec(low=_ONE, high=_ONE), tasks=("simulated",), instructions=("",), horizon=1
)
_CHUNK = SlotChunk(
    observation={}, reward=_ONE, valid=np.ones(1, np.bool_), terminated=False, truncated=False, success=False
)


class SimulatedSimulators(Worker):
    """Environments whose chunks and resets take the time of the profile."""

    def __init__(self, context: WorkerContext, costs: EnvCosts, pace: Pace, num_processes: int) -> None:
        """num_processes: processes that simulate at the same time on the host."""
        super().__init__(context)
        self._costs, self._pace, self._loop = costs, pace, virtual_loop()
        self._num_devices = max(1, len(context.devices))
        self._free_s = [0.0] * num_processes
        self._counts = EnvCounts()

    @operation(on_device=False)
    async def spec(self) -> EnvSpec:
        """Returns the shapes of an environment without content."""
        return _SPEC

    @operation(bin="simulate")
    async def simulate(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        num_chunks = sum(job.kind == "chunk" for job in jobs)
        seconds = self._costs.chunk_s(num_chunks) if num_chunks else 0.0
        if num_chunks < len(jobs):
            seconds += self._costs.reset_s
        await self._pace.work(ROLE, seconds / self._costs.speed(self._num_devices))
        return self._make_batch(jobs, seconds)

    @operation(on_device=False, phase="env")
    async def simulate_beside(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Takes the time of each job separately, in the process that is free first."""
        now = end_s = self._loop.now_s
        busy_s = 0.0
        for job in jobs:
            seconds = self._costs.chunk_s(1) if job.kind == "chunk" else self._costs.reset_s
            done_s = max(now, self._free_s[0]) + seconds
            heapq.heapreplace(self._free_s, done_s)
            end_s, busy_s = max(end_s, done_s), busy_s + seconds
        await self._loop.alarm(end_s - now)
        return self._make_batch(jobs, busy_s)

    @operation(on_device=False, concurrent=True)
    def forget(self, slot: int) -> None:
        """Does nothing: an episode leaves no state."""

    async def onload(self) -> None:
        await self._pace.work(ROLE, self._costs.onload_s / self._num_devices)

    async def offload(self) -> None:
        await self._pace.work(ROLE, self._costs.offload_s / self._num_devices)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._costs.memory_bytes(self._num_devices)

    def _make_batch(self, jobs: Sequence[SlotJob], busy_s: float) -> EnvBatch:
        num_chunks = sum(job.kind == "chunk" for job in jobs)
        done = EnvCounts(num_actions=num_chunks, num_resets=len(jobs) - num_chunks, busy_s=busy_s)
        self._counts = self._counts.plus(done)
        answers = [SlotAnswer(value=_CHUNK if job.kind == "chunk" else {}) for job in jobs]
        return EnvBatch(answers=answers, counts=self._counts)
