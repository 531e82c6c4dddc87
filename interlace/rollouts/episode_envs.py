"""Client and server for environments of the run that are used by episodes in other processes."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from interlace.core.errors import UserError
from interlace.rollouts.envs.episode import Around, EnvEpisode
from interlace.rollouts.envs.jobs import JobKind, Start
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation, SimulatorError
from interlace.rollouts.session import EpisodeSession

Wish: TypeAlias = JobKind | Literal["lease", "release"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvAsk:
    """Request of an episode to one of its environments."""

    number: int
    """Number of the expected answer. A `release` has no answer, so its number is ignored."""
    lease: int
    """Number of the lease, which identifies the environment."""
    wish: Wish
    start: Start | None = None
    """Start of the episode; set for a lease."""
    actions: Array | None = None
    """[K, A] actions; set for a chunk."""
    count: int = 1
    """Number of the expert's actions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvAnswer:
    """Result of an EnvAsk: (EnvSpec, Observation) of a lease, else the value of a SlotAnswer."""

    number: int
    value: object = None
    error: Exception | None = None


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
                found: Any = await self._send_request(lease, "lease", start=start)
            spec, observation = found

            async def ask(kind: JobKind, actions: Array | None, count: int) -> object:
                return await self._send_request(lease, kind, actions=actions, count=count)

            yield EnvEpisode(ask, spec, observation, around)
        finally:
            self._send(EnvAsk(number=lease, lease=lease, wish="release"))

    def answered(self, answer: EnvAnswer) -> None:
        """Receives an answer; ignores it if no request waits for it."""
        waiting = self._answers.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.error:
            waiting.set_exception(answer.error)
        else:
            waiting.set_result(answer.value)

    async def _send_request(
        self, lease: int, wish: Wish, *, start: Start | None = None, actions: Array | None = None, count: int = 1
    ) -> object:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(EnvAsk(number=number, lease=lease, wish=wish, start=start, actions=actions, count=count))
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

    def asked(self, ask: EnvAsk) -> None:
        """Starts a request. Releasing a lease cancels its pending requests."""
        if ask.wish == "release":
            for task in [task for task, lease in self._tasks.items() if lease == ask.lease]:
                task.cancel()
        task = asyncio.ensure_future(
            self._release_lease(ask.lease) if ask.wish == "release" else self._run_request(ask)
        )
        self._tasks[task] = -1 if ask.wish == "release" else ask.lease
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def close(self) -> None:
        """Releases all environments."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in [*self._leased]:
            await self._release_lease(lease)

    async def _run_request(self, ask: EnvAsk) -> None:
        try:
            value = await (self._lease_environment(ask.lease, ask.start) if ask.start else self._run_job(ask))
            self._answer(EnvAnswer(number=ask.number, value=value))
        except (UserError, SimulatorError) as error:
            self._answer(EnvAnswer(number=ask.number, error=error))

    async def _lease_environment(self, lease: int, start: Start) -> tuple[EnvSpec, Observation]:
        stack = AsyncExitStack()
        env = await stack.enter_async_context(self._session.simulator(start))
        self._leased[lease] = stack, env
        return env.spec, env.observation

    async def _run_job(self, ask: EnvAsk) -> object:
        kind: Any = ask.wish
        return await self._leased[ask.lease][1].do(kind, ask.actions, count=ask.count)

    async def _release_lease(self, lease: int) -> None:
        stack, _ = self._leased.pop(lease, (AsyncExitStack(), None))
        await stack.aclose()
