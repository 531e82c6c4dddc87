"""Episodes and simulators on the virtual clock: turns, the tokens that each turn receives, and seconds."""

import asyncio
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from interlace.core.types import Prompt
from interlace.forecast.costs.lengths import interpolate, uniforms
from interlace.forecast.costs.pace import Pace
from interlace.forecast.profile.types import EnvCosts, Turns
from interlace.rollouts.base import Session
from interlace.rollouts.envs.spec import ActionSpec, EnvBatch, EnvCounts, EnvSpec, SlotAnswer, SlotChunk, SlotJob, Start
from interlace.runtime.sim.loop import virtual_loop
from interlace.runtime.worker import Worker, WorkerContext, operation

NO_ACTIONS = np.zeros((1, 1), np.float32)
"""[K, A] actions of a chunk that only takes time."""


class ToolBatches:
    """Tools that run as a batch: see Turns.tools."""

    def __init__(self) -> None:
        self._num_running = 0
        self._waiting: list[tuple[asyncio.Future[None], float]] = []

    @contextmanager
    def episode(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._begin_if_complete()

    async def run_tool(self, seconds: float) -> None:
        """Waits until all episodes have ended their turns, and then for the slowest tool."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ended, seconds))
        self._begin_if_complete()
        await ended

    def _begin_if_complete(self) -> None:
        waiting = [(ended, seconds) for ended, seconds in self._waiting if not ended.done()]
        if waiting and len(waiting) >= self._num_running:
            self._waiting = []
            slowest_s = max(seconds for _, seconds in waiting)
            asyncio.get_running_loop().call_later(slowest_s, _end_all, [ended for ended, _ in waiting])


def _end_all(tools: Sequence["asyncio.Future[None]"]) -> None:
    for ended in tools:
        if not ended.done():
            ended.set_result(None)


class SimulatedEpisode:
    """Episode drawn from a turn model, keyed by its sample: the same under every schedule.

    With simulators, each turn's chunk goes to a simulator, and the next turn has a separate context. Without
    simulators, a wait takes the time of a tool, and the context of the next turn extends the previous turns.
    """

    def __init__(self, turns: Turns, *, brings_reward: bool, has_envs: bool = False) -> None:
        """brings_reward: False if a scorer gives the reward. has_envs: True if the run has simulators."""
        self._turns, self._brings_reward, self._has_envs = turns, brings_reward, has_envs
        self._batches = ToolBatches() if turns.tools == "synchronous" else None

    async def run(self, prompt: Prompt, session: Session) -> float | None:
        """Runs the turns, with a wait for the tool between them."""
        model, seed = self._turns, session.seed
        count, is_right = uniforms("turns", seed)
        reward = float(is_right < model.reward) if self._brings_reward else None
        num_turns = max(1, round(interpolate(model.turns, count)))
        if self._has_envs:
            await self._play_turns(prompt, session, num_turns)
            return reward
        with self._batches.episode() if self._batches else nullcontext():
            await self._use_tools(prompt, session, num_turns)
        return reward

    async def _use_tools(self, prompt: Prompt, session: Session, num_turns: int) -> None:
        model, context, drawn = self._turns, prompt.token_ids.tolist(), list[int]()
        run_tool = self._batches.run_tool if self._batches else asyncio.sleep
        for number in range(num_turns):
            if number:
                length, seconds = uniforms("tool", session.seed, number)
                async with session.waiting("a tool"):
                    await run_tool(interpolate(model.tool_s, seconds))
                context = [*context, *drawn, *[0] * round(interpolate(model.given_tokens, length))]
            drawn = (await session.generate(context)).token_ids.tolist()

    async def _play_turns(self, prompt: Prompt, session: Session, num_turns: int) -> None:
        sensed = [0] * round(interpolate(self._turns.given_tokens, 0.5))
        async with session.simulator(Start(task=0, init_state=0)) as env:
            for _ in range(num_turns):
                await session.generate([*prompt.token_ids.tolist(), *sensed])
                await env.chunk_step(NO_ACTIONS)


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
