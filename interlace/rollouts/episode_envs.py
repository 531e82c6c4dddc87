"""Client and server for environments of the run that are used by episodes in other processes."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import UserError
from interlace.rollouts.envs.episode import Around, EnvEpisode
from interlace.rollouts.envs.jobs import SlotAnswer, SlotJob, Start
from interlace.rollouts.envs.spec import EnvSpec, Observation, SimulatorError
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
        """send: sends a request to the run."""
        self._send, self._numbers = send, itertools.count()
        self._answers: dict[int, asyncio.Future[object]] = {}

    @asynccontextmanager
    async def episode(self, start: Start, *, around: Around) -> AsyncIterator[EnvEpisode]:
        """Leases an environment of the run."""
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
        waiting = self._answers.get(found.number)
        if waiting is None or waiting.done():
            return
        if found.answer.error:
            waiting.set_exception(found.answer.error)
        else:
            waiting.set_result(found.answer.value)

    async def _send_job(self, job: SlotJob) -> object:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(EnvAsk(number=number, lease=job.slot, job=job))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]


class EnvLeases:
    """Server of the environments that an episode in another process has leased."""

    def __init__(self, session: EpisodeSession, answer: Callable[[EnvAnswer], None]) -> None:
        """answer: sends an answer to the episode."""
        self._session, self._answer = session, answer
        self._leased: dict[int, tuple[AsyncExitStack, EnvEpisode]] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Running task -> lease that it works on."""

    def take_request(self, ask: EnvAsk) -> None:
        """Starts a request. Releasing a lease cancels its pending requests."""
        if ask.job is None:
            for task in [task for task, lease in self._tasks.items() if lease == ask.lease]:
                task.cancel()
        task = asyncio.ensure_future(
            self._release_lease(ask.lease) if ask.job is None else self._run_request(ask.number, ask.job)
        )
        self._tasks[task] = -1 if ask.job is None else ask.lease
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def close(self) -> None:
        """Releases all environments."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in [*self._leased]:
            await self._release_lease(lease)

    async def _run_request(self, number: int, job: SlotJob) -> None:
        try:
            value = await (self._lease_environment(job.slot, job.start) if job.start else self._run_job(job))
            answer = SlotAnswer(value=value)
        except (UserError, SimulatorError) as error:
            answer = SlotAnswer(error=error)
        self._answer(EnvAnswer(number=number, answer=answer))

    async def _lease_environment(self, lease: int, start: Start) -> tuple[EnvSpec, Observation]:
        stack = AsyncExitStack()
        env = await stack.enter_async_context(self._session.simulator(start))
        self._leased[lease] = stack, env
        return env.spec, env.observation

    async def _run_job(self, job: SlotJob) -> object:
        return await self._leased[job.slot][1].do(job.kind, job.actions, count=job.count)

    async def _release_lease(self, lease: int) -> None:
        stack, _ = self._leased.pop(lease, (AsyncExitStack(), None))
        await stack.aclose()
