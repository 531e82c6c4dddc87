"""Processes that run episodes, so that a user's Python never blocks the run; one that dies or hangs is replaced."""

import asyncio
import contextlib
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from interlace.core.causes import Cause
from interlace.core.errors import (
    EnginesBusyError,
    EpisodeFailedError,
    EpisodeLostError,
    InterlaceError,
    RestartBudgetError,
    UserError,
)
from interlace.core.recovery import RestartBudget
from interlace.core.runs import Runs
from interlace.core.types import EMPTY_FLOAT, EMPTY_INT, Prompt, SamplingParams
from interlace.observe.films import Film
from interlace.robots.episode_envs import EnvAsk, EnvLeases
from interlace.rollouts.base import Outcome, Session, Turn, TurnDraft, TurnOptions
from interlace.rollouts.episode_process import (
    BLOCKED_AFTER_S,
    NO_EPISODE,
    EpisodeCancel,
    EpisodeEnd,
    EpisodeStart,
    FromEpisode,
    MakeEpisode,
    ToEpisode,
    TurnAnswer,
    TurnAsk,
    TurnSoFar,
    TurnWithdraw,
    WaitNote,
    serve_episodes,
)
from interlace.rollouts.session import EpisodeSession
from interlace.runtime.process.child import framed, take_frames
from interlace.runtime.process.children import Child, Children, Place

LEAVE_S = 5.0
"""How long a cancelled episode may take to end before its process counts as stuck."""
RETRY_S = 0.1
"""After a process could not be started."""
SHARE = 64
"""Episodes that a process gets at most while others are still starting."""


def patience_s(timeout_s: float) -> float:
    """Returns the time limit that a run keeps for an episode whose process keeps timeout_s by itself."""
    return timeout_s + min(timeout_s, BLOCKED_AFTER_S) + LEAVE_S


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """An episode in a process, or on its way to one."""

    number: int
    start: bytes
    """Framed."""
    messages: "asyncio.Queue[FromEpisode | Exception]" = field(default_factory=asyncio.Queue)
    """Messages from it; an exception ends it."""
    alone: bool = False
    child: Child | None = None
    leave_by_s: float = 0.0
    """When a cancelled one has to have ended; 0: it is not cancelled."""


class _Processes(Children):
    """The processes, each with many episodes. Jobs are handed over by thread-safe queues."""

    def __init__(
        self, make: MakeEpisode, params: SamplingParams, num: int, place: Place | None, budget: RestartBudget | None
    ) -> None:
        super().__init__("episodes", ("interlace.rollouts.episode_process",), place, budget)
        self._make, self._params, self._num_workers = make, params, num
        self._loop = asyncio.get_running_loop()
        self._asked: deque[tuple[_Job, ToEpisode | None]] = deque()
        """None: the job itself."""
        self._jobs: dict[Child, dict[int, _Job]] = {}
        self._waiting: deque[_Job] = deque()
        self._lonely: deque[_Job] = deque()
        """Episodes that wait to run alone."""
        self.num_lost = 0
        """Processes that died or were replaced."""
        self._is_eager = True
        """Flag: processes start before there are episodes; not where they could not be started."""
        self._thread.start()
        self._wake()

    def begin(self, job: _Job) -> None:
        """Runs an episode as soon as a process has room."""
        self._asked.append((job, None))
        self._refuse_after_error()
        self._wake()

    def tell(self, job: _Job, message: ToEpisode) -> None:
        """Sends a word to an episode; lost where its process is gone."""
        self._asked.append((job, message))
        self._wake()

    @property
    def num_ready(self) -> int:
        """Processes that have started."""
        return sum(child.is_ready for child in [*self._children])

    def _patience_s(self) -> float | None:
        if (self._waiting or self._lonely) and not self._children:
            return RETRY_S
        limits = [job.leave_by_s for jobs in self._jobs.values() for job in jobs.values() if job.leave_by_s]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _serve(self) -> None:
        while self._asked:
            job, message = self._asked.popleft()
            if message is None:
                (self._lonely if job.alone else self._waiting).append(job)
            elif isinstance(message, EpisodeCancel):
                self._cancel(job, message)
            elif job.child is not None:
                self._send(job.child, framed(job.number, message))
        self._keep_limits()
        self._hand_out()

    def _cancel(self, job: _Job, message: EpisodeCancel) -> None:
        for queue in (self._waiting, self._lonely):
            with contextlib.suppress(ValueError):
                queue.remove(job)
        if job.child is not None:
            job.leave_by_s = time.monotonic() + LEAVE_S
            self._send(job.child, framed(job.number, message))

    def _keep_limits(self) -> None:
        now_s = time.monotonic()
        for child, jobs in [*self._jobs.items()]:
            if any(0 < job.leave_by_s <= now_s for job in jobs.values()):
                self._lose(child, "was stuck")

    def _hand_out(self) -> None:
        shared = [child for child in self._children if not any(job.alone for job in self._jobs[child].values())]
        if self._waiting or self._lonely or self._is_eager:
            self._start_more(self._num_workers - len(shared))
        ready = [child for child in shared if child.is_ready]
        while self._lonely and (empty := next((child for child in ready if not self._jobs[child]), None)):
            ready.remove(empty)
            self._give(empty, self._lonely.popleft())
        if self._lonely and all(child.is_ready for child in self._children):
            self._start_more(1)
        # Until all have started, those that have get no more than a share each.
        share = (
            SHARE
            if len(ready) < self._num_workers
            else len(self._waiting) + max(map(len, self._jobs.values()), default=0)
        )
        while self._waiting and ready:
            fewest = min(ready, key=lambda child: len(self._jobs[child]))
            if len(self._jobs[fewest]) >= share:
                return
            self._give(fewest, self._waiting.popleft())

    def _start_more(self, num_wanted: int) -> None:
        for _ in range(num_wanted):
            if started := self._start(serve_episodes, self._make, self._params):
                self._jobs[started] = {}

    def _give(self, child: Child, job: _Job) -> None:
        job.child = child
        self._jobs[child][job.number] = job
        self._send(child, job.start)

    def _heard(self, child: Child) -> None:
        for number, message in take_frames(child.received):
            if number == NO_EPISODE:
                self._introduced(child, message)
            elif job := self._jobs[child].get(number):
                self._answered(child, job, message)

    def _introduced(self, child: Child, refusal: UserError | None) -> None:
        if refusal is None:
            self._is_ready(child)
            return
        self._fail_waiting(refusal)

    def _answered(self, child: Child, job: _Job, message: FromEpisode) -> None:
        self._pass_on(job, message)
        if isinstance(message, EpisodeEnd):
            del self._jobs[child][job.number]
            if message.blocked:
                self._lose(child, "was blocked by another episode")

    def _died(self, child: Child) -> None:
        code = child.ended_with()
        if not child.is_ready:
            self._started_badly(f"it ended with exit code {code} while the episode was loaded")
        self._lose(child, "is gone" if code is None else f"ended with exit code {code}")

    def _lose(self, child: Child, reason: str) -> None:
        self.num_lost += 1
        for job in self._jobs.pop(child).values():
            job.child = None
            self._pass_on(job, EpisodeLostError(f"its process {reason}"))
        self._end(child)

    def _could_not_start(self, reason: str) -> None:
        self._is_eager = False
        self._fail_waiting(InterlaceError(f"a process for episodes could not be started: {reason}"))

    def _fail_waiting(self, error: Exception) -> None:
        for queue in (self._waiting, self._lonely):
            while queue:
                self._pass_on(queue.popleft(), error)

    def _fail_all(self, error: BaseException | None) -> None:
        running = [job for jobs in self._jobs.values() for job in jobs.values()]
        if not isinstance(error, RestartBudgetError):
            error = InterlaceError(f"the processes of episodes have ended: {error or 'the run ends'}")
        for job in [*running, *self._waiting, *self._lonely, *(job for job, message in self._asked if message is None)]:
            self._pass_on(job, error)

    def _pass_on(self, job: _Job, message: FromEpisode | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no episode is awaited any more
            self._loop.call_soon_threadsafe(job.messages.put_nowait, message)


class WorkerEpisodes:
    """Episode that runs in other processes: here are its turns, its time and its end, so that all is as without them.

    An exception, a time limit and a blocked event loop end the one sample. A process that dies takes its episodes with
    it: EpisodeLostError, after which the sample begins again. The last time that it may it runs alone in a process, and
    is to blame for what happens.
    """

    def __init__(
        self,
        make: MakeEpisode,
        params: SamplingParams,
        num_workers: int,
        *,
        place: Place | None = None,
        budget: RestartBudget | None = None,
    ) -> None:
        """Made on a running event loop. make: picklable. params: the run's. place, budget: see Children."""
        self._params = params
        self._processes = _Processes(make, params, num_workers, place, budget)
        self._num_begun = 0
        self._films: list[Film] = []
        self._why_no_films = ""

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()

    @property
    def num_ready(self) -> int:
        """Processes that have started and are there."""
        return self._processes.num_ready

    @property
    def num_lost(self) -> int:
        """Processes that died or were replaced."""
        return self._processes.num_lost

    def films(self) -> list[Film]:
        """Returns the films that were taken since the last call, by name."""
        found, self._films = sorted(self._films, key=lambda film: film.name), []
        return found

    def why_no_films(self) -> str:
        """Returns why nothing can be drawn; empty where something can."""
        return self._why_no_films

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs one episode to its end."""
        here = cast(EpisodeSession, session)
        number, self._num_begun = self._num_begun, (self._num_begun + 1) % NO_EPISODE
        params = None if here.params is self._params else here.params
        start = framed(number, EpisodeStart(key=here.key, prompt=prompt, params=params))
        job = _Job(number=number, start=start, alone=not here.may_begin_again)
        self._processes.begin(job)
        try:
            async with _Exchange(self._processes, job, here) as exchange:
                end = await exchange.until_end()
            self._films += end.films
            self._why_no_films = end.why_no_films or self._why_no_films
            return exchange.outcome(end)
        except EpisodeLostError as error:
            if job.alone:
                reason = f"{error}, {here.num_begun} times, the last time alone there"
                raise EpisodeFailedError(reason, Cause.USER) from None
            raise
        except asyncio.CancelledError:
            self._processes.tell(job, EpisodeCancel())
            raise


class _Exchange:
    """Words between one episode and its session here."""

    def __init__(self, processes: _Processes, job: _Job, session: EpisodeSession) -> None:
        self._processes, self._job, self._session = processes, job, session
        self._envs = EnvLeases(session, partial(processes.tell, job))
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Turn] = {}
        self._waits: dict[int, AsyncExitStack] = {}

    async def __aenter__(self) -> "_Exchange":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._turns.values():
            task.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)
        await self._envs.close()
        for stack in self._waits.values():
            await stack.aclose()

    async def until_end(self) -> EpisodeEnd:
        """Does what the episode asks for until it ends."""
        while True:
            message = await self._job.messages.get()
            if isinstance(message, Exception):
                raise message
            if isinstance(message, TurnAsk):
                self._turns[message.turn] = asyncio.ensure_future(self._turn(message))
            elif isinstance(message, TurnWithdraw):
                if task := self._turns.pop(message.turn, None):
                    task.cancel()
            elif isinstance(message, EnvAsk):
                self._envs.asked(message)
            elif isinstance(message, WaitNote):
                await self._wait(message)
            else:
                return message

    async def _turn(self, ask: TurnAsk) -> None:
        params = ask.params or self._session.params
        try:
            turn = await self._session.generate(
                ask.prompt_ids,
                params=params,
                number=ask.turn,
                inputs=ask.inputs,
                query_ids=ask.query_ids,
                options=TurnOptions(
                    on_draft=partial(self._drafted, ask.turn) if ask.streams else None, patience_s=ask.patience_s
                ),
            )
        except UserError as error:
            nothing = TurnAnswer(
                turn=ask.turn,
                token_ids=EMPTY_INT,
                logprobs=EMPTY_FLOAT,
                versions=Runs(()),
                refusal=str(error),
                is_busy=isinstance(error, EnginesBusyError),
            )
            self._processes.tell(self._job, nothing)
            return
        except Exception as error:  # noqa: BLE001 - what ends the episode here ends it there too
            self._job.messages.put_nowait(error)
            return
        self._done[ask.turn] = turn
        answer = TurnAnswer(
            turn=ask.turn,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            versions=turn.versions,
            finish_reason=turn.finish_reason,
            text=turn.text,
            num_cached_tokens=turn.num_cached_tokens,
        )
        self._processes.tell(self._job, answer)

    def _drafted(self, turn: int, draft: TurnDraft) -> None:
        self._processes.tell(self._job, TurnSoFar(turn=turn, token_ids=draft.token_ids, text=draft.text))

    async def _wait(self, note: WaitNote) -> None:
        if note.what is None:
            await self._waits.pop(note.number).aclose()
            return
        self._waits[note.number] = stack = AsyncExitStack()
        await stack.enter_async_context(self._session.waiting(note.what))

    def outcome(self, end: EpisodeEnd) -> Outcome:
        """Returns what came of the episode, with its rewards noted here. Raises what it failed with."""
        if end.lost:
            raise EpisodeLostError(end.failure)
        if end.outcome is None:
            raise EpisodeFailedError(end.failure, end.cause)
        for number, value in end.rewards.items():
            self._session.reward(self._done[number], value)
        for use in end.tool_uses:
            self._session.tool_called(use.name, seconds=use.seconds, failed=use.failed)
        return end.outcome
