"""Client and server for environments of the run that are used by episodes in other processes."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import InterlaceError
from interlace.core.tasks import cancel_tasks
from interlace.rollouts.envs.spec import Around, EnvEpisode, SlotAnswer, SlotJob, Start
from interlace.rollouts.session import EpisodeSession


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvAsk:
    """Request of an episode to one of its environments."""

    lease: int
    """Number of the lease, which identifies the environment."""
    job: SlotJob | None = None
    """Job of the environment, with the lease as its slot. A reset leases an environment; None releases it."""
    number: int = 0
    """Number of the expected answer. A release has no answer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvAnswer:
    """Answer to an EnvAsk. The value of a reset is (EnvSpec, Observation)."""

    number: int
    answer: SlotAnswer


class EnvProxies:
    """Client of the run's environments for an episode in another process. A `Simulators` of its session."""

    def __init__(self, send: Callable[[EnvAsk], None]) -> None:
        self._send, self._numbers = send, itertools.count()
        self._answers: dict[int, asyncio.Future[object]] = {}

    @asynccontextmanager
    async def episode(self, start: Start, *, around: Around) -> AsyncIterator[EnvEpisode]:
        lease = next(self._numbers)
        try:
            with around():
                found: Any = await self._send_job(SlotJob(slot=lease, kind="reset", start=start))
            spec, observation = found
            yield EnvEpisode(self._send_job, lease, spec, observation, around)
        finally:
            self._send(EnvAsk(lease=lease))

    def take_answer(self, found: EnvAnswer) -> None:
        """Receives an answer; ignores it if no request waits for it."""
        if waiting := self._answers.get(found.number):
            found.answer.settle(waiting)

    async def _send_job(self, job: SlotJob) -> object:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(EnvAsk(number=number, lease=job.slot, job=job))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]


class EnvLeases:
    """Server of the environments that an episode in another process has leased. One task holds each environment."""

    def __init__(self, session: EpisodeSession, answer: Callable[[EnvAnswer], None]) -> None:
        self._session, self._answer = session, answer
        self._jobs: dict[int, asyncio.Queue[tuple[int, SlotJob]]] = {}
        """Lease -> jobs of its environment after the reset, each with the number of its answer."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Lease -> task that holds its environment."""

    def take_request(self, ask: EnvAsk) -> None:
        """Starts a request. Releasing a lease cancels its pending requests."""
        if ask.job is None:
            self._jobs.pop(ask.lease, None)
            if task := self._tasks.get(ask.lease):
                task.cancel()
            return
        if ask.job.start:
            jobs = self._jobs[ask.lease] = asyncio.Queue()
            task = self._tasks[ask.lease] = asyncio.ensure_future(
                self._hold_environment(ask.number, ask.job.start, jobs)
            )
            task.add_done_callback(lambda _: self._tasks.pop(ask.lease))
        else:
            self._jobs[ask.lease].put_nowait((ask.number, ask.job))

    async def close(self) -> None:
        await cancel_tasks([*self._tasks.values()])

    async def _hold_environment(self, number: int, start: Start, jobs: "asyncio.Queue[tuple[int, SlotJob]]") -> None:
        """Leases an environment and runs its jobs until the task is cancelled. number: of the answer to the reset."""
        try:
            async with self._session.simulator(start) as env:
                self._answer(EnvAnswer(number=number, answer=SlotAnswer(value=(env.spec, env.observation))))
                while True:
                    number_of_job, job = await jobs.get()
                    self._answer(EnvAnswer(number=number_of_job, answer=await _run_job(env, job)))
        except InterlaceError as error:  # the lease or the reset failed
            self._answer(EnvAnswer(number=number, answer=SlotAnswer(error=error)))


async def _run_job(env: EnvEpisode, job: SlotJob) -> SlotAnswer:
    try:
        return SlotAnswer(value=await env.do(job.kind, job.actions, count=job.count))
    except InterlaceError as error:
        return SlotAnswer(error=error)
