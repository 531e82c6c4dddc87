"""Processes that run episodes, so that code of users never blocks the run. Processes that die or hang are replaced."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from interlace.core.errors import (
    EpisodeFailedError,
    EpisodeLostError,
    EpisodeProcessLostError,
    InterlaceError,
    RestartBudgetError,
    UserError,
)
from interlace.core.messages import Message
from interlace.core.recovery import Cause, RestartBudget
from interlace.core.tasks import cancel_tasks
from interlace.core.types import EMPTY_INT, Prompt, SamplingParams
from interlace.observe.films import Film
from interlace.rollouts.base import Outcome, Session, Turn, TurnDraft, TurnOptions
from interlace.rollouts.episode_envs import EnvAsk, EnvLeases
from interlace.rollouts.episode_process import (
    LEAVE_S,
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
from interlace.runtime.process.child import frame_message, take_frames
from interlace.runtime.process.links import Child
from interlace.runtime.process.pool import Place, ProcessJob, ProcessPool, list_jobs

RETRY_S = 0.1
"""Delay, in seconds, after a process could not be started."""
_TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""Module that most episodes need, and that takes seconds to import."""
NO_MESSAGE = Message(role="assistant", content="")
SHARE = 64
"""Maximum number of episodes of a process while other processes are still starting."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Job(ProcessJob):
    """An episode that runs in a process or waits for one. It has a time limit once it is cancelled."""

    start: bytes
    """The framed EpisodeStart message."""
    messages: "asyncio.Queue[FromEpisode | Exception]" = field(default_factory=asyncio.Queue)
    """Messages of the episode. An exception ends it."""
    alone: bool = False
    child: Child | None = None


class _Processes(ProcessPool[_Job, tuple[_Job, ToEpisode | None]]):
    """The processes, each with many episodes. The thread gets messages to episodes. None starts the episode."""

    def __init__(
        self, make: MakeEpisode, params: SamplingParams, num: int, place: Place | None, budget: RestartBudget | None
    ) -> None:
        maker = getattr(getattr(make, "func", make), "__module__", "__main__")
        preload = ("interlace.rollouts.episode_process", *((maker,) if maker != "__main__" else ()), _TOKENIZERS)
        super().__init__("episodes", preload, place, budget)
        self._make, self._params, self._num_workers = make, params, num
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Job] = deque()
        self._lonely: deque[_Job] = deque()
        """Waiting episodes that must run alone in a process."""
        self.num_lost = 0
        """Number of processes that died or were replaced."""
        self._is_eager = True
        """True if processes start before the first episode. False after a process could not be started."""
        self._thread.start()
        self._links.wake()

    def begin(self, job: _Job) -> None:
        """Starts an episode as soon as a process has room."""
        self._submit((job, None))

    def send(self, job: _Job, message: ToEpisode) -> None:
        """Sends a message to an episode. The message is dropped if the process has ended."""
        self._submitted.append((job, message))
        self._links.wake()

    @property
    def num_ready(self) -> int:
        return sum(child.is_ready for child in [*self._children])

    def _patience_s(self) -> float | None:
        if (self._waiting or self._lonely) and not self._children:
            return RETRY_S
        return super()._patience_s()

    def _accept(self, submitted: tuple[_Job, ToEpisode | None]) -> None:
        job, message = submitted
        if message is None:
            (self._lonely if job.alone else self._waiting).append(job)
        elif isinstance(message, EpisodeCancel):
            self._cancel_job(job, message)
        elif job.child is not None:
            self._links.send(job.child, frame_message(job.number, message))

    def _cancel_job(self, job: _Job, message: EpisodeCancel) -> None:
        for queue in (self._waiting, self._lonely):
            with contextlib.suppress(ValueError):
                queue.remove(job)
        if job.child is not None:
            job.deadline_s = time.monotonic() + LEAVE_S
            self._links.send(job.child, frame_message(job.number, message))

    def _handle_late(self, child: Child, late: Sequence[_Job]) -> None:  # noqa: ARG002 - all its episodes are lost
        self._lose_process(child, "was stuck")

    def _hand_out(self) -> None:
        shared = [child for child in self._children if not any(job.alone for job in self._jobs[child].values())]
        if self._waiting or self._lonely or self._is_eager:
            self._start_more(self._num_workers - len(shared))
        ready = [child for child in shared if child.is_ready]
        while self._lonely and (empty := next((child for child in ready if not self._jobs[child]), None)):
            ready.remove(empty)
            self._send_job(empty, self._lonely.popleft())
        if self._lonely and all(child.is_ready for child in self._children):
            self._start_more(1)
        # Until all processes have started, each started one gets at most SHARE episodes.
        share = (
            SHARE
            if len(ready) < self._num_workers
            else len(self._waiting) + max(map(len, self._jobs.values()), default=0)
        )
        while self._waiting and ready:
            fewest = min(ready, key=lambda child: len(self._jobs[child]))
            if len(self._jobs[fewest]) >= share:
                return
            self._send_job(fewest, self._waiting.popleft())

    def _start_more(self, num_wanted: int) -> None:
        for _ in range(num_wanted):
            self._start(serve_episodes, self._make, self._params)

    def _send_job(self, child: Child, job: _Job) -> None:
        job.child = child
        self._jobs[child][job.number] = job
        self._links.send(child, job.start)

    def _heard(self, child: Child) -> None:
        for number, message in take_frames(child.received):
            if number == NO_EPISODE:
                self._handle_introduction(child, message)
            elif job := self._jobs[child].get(number):
                self._handle_answer(child, job, message)

    def _handle_introduction(self, child: Child, refusal: UserError | None) -> None:
        if refusal is None:
            self._is_ready(child)
            return
        self._fail_waiting(refusal)

    def _handle_answer(self, child: Child, job: _Job, message: FromEpisode) -> None:
        self._pass_on(job, message)
        if isinstance(message, EpisodeEnd):
            del self._jobs[child][job.number]
            if message.blocked:
                self._lose_process(child, "was blocked by another episode")

    def _handle_death(self, child: Child) -> None:
        code = child.find_exit_code()
        if not child.is_ready:
            self._record_bad_start(f"it ended with exit code {code} while the episode was loaded")
        self._lose_process(child, "is gone" if code is None else f"ended with exit code {code}")

    def _lose_process(self, child: Child, reason: str) -> None:
        self.num_lost += 1
        for job in self._end(child):
            job.child = None
            self._pass_on(job, EpisodeProcessLostError(f"its process {reason}"))

    def _could_not_start(self, reason: str) -> None:
        self._is_eager = False
        self._fail_waiting(InterlaceError(f"a process for episodes could not be started: {reason}"))

    def _fail_waiting(self, error: Exception) -> None:
        for queue in (self._waiting, self._lonely):
            while queue:
                self._pass_on(queue.popleft(), error)

    def _fail_all(self, error: BaseException | None) -> None:
        if not isinstance(error, RestartBudgetError):
            error = InterlaceError(f"the processes of episodes have ended: {error or 'the run ends'}")
        begun = [job for job, message in [*self._submitted] if message is None]
        for job in [*list_jobs(self._jobs), *self._waiting, *self._lonely, *begun]:
            self._pass_on(job, error)

    def _pass_on(self, job: _Job, message: FromEpisode | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no episode is awaited any more
            self._loop.call_soon_threadsafe(job.messages.put_nowait, message)


class WorkerEpisodes:
    """Runs the episodes of a run in other processes. Turns, time limits and results are handled in the controller.

    An exception, a time limit or a blocked event loop ends only its sample. If a process dies, all its episodes raise
    EpisodeLostError, and their samples start again. In its last attempt an episode runs alone in a process, so that a
    further loss is its fault and fails the sample.
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
        """Requires a running event loop. make: picklable. params: the run's. place, budget: see ProcessPool."""
        self._params = params
        self._processes = _Processes(make, params, num_workers, place, budget)
        self._num_begun = 0
        self._films: list[Film] = []
        self._why_no_films = ""

    def close(self) -> None:
        self._processes.close()

    @property
    def num_ready(self) -> int:
        return self._processes.num_ready

    @property
    def num_lost(self) -> int:
        return self._processes.num_lost

    def films(self) -> list[Film]:
        found, self._films = sorted(self._films, key=lambda film: film.name), []
        return found

    def why_no_films(self) -> str:
        return self._why_no_films

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        here = cast(EpisodeSession, session)
        number, self._num_begun = self._num_begun, (self._num_begun + 1) % NO_EPISODE
        params = None if here.params is self._params else here.params
        start = frame_message(number, EpisodeStart(key=here.key, prompt=prompt, params=params))
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
            self._processes.send(job, EpisodeCancel())
            raise


class _Exchange:
    """Exchange of messages between one episode in its process and its session in the controller."""

    def __init__(self, processes: _Processes, job: _Job, session: EpisodeSession) -> None:
        self._processes, self._job, self._session = processes, job, session
        self._envs = EnvLeases(session, partial(processes.send, job))
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Turn] = {}
        self._waits: dict[int, contextlib.AsyncExitStack] = {}

    async def __aenter__(self) -> "_Exchange":
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._turns.values()])
        await self._envs.close()
        for stack in self._waits.values():
            await stack.aclose()

    async def until_end(self) -> EpisodeEnd:
        """Serves the requests of the episode until it ends."""
        while True:
            message = await self._job.messages.get()
            if isinstance(message, Exception):
                raise message
            if isinstance(message, TurnAsk):
                self._turns[message.turn] = asyncio.ensure_future(self._answer_turn(message))
            elif isinstance(message, TurnWithdraw):
                if task := self._turns.pop(message.turn, None):
                    task.cancel()
                if self._done.pop(message.turn, None):  # its answer crossed the withdrawal
                    self._session.withdraw_turn(message.turn)
            elif isinstance(message, EnvAsk):
                self._envs.take_request(message)
            elif isinstance(message, WaitNote):
                await self._hold_wait(message)
            else:
                return message

    async def _answer_turn(self, ask: TurnAsk) -> None:
        params = ask.params or self._session.params
        try:
            turn = await self._session.generate(
                ask.prompt_ids,
                params=params,
                number=ask.turn,
                inputs=ask.inputs,
                query_ids=ask.query_ids,
                options=TurnOptions(
                    on_draft=partial(self._send_draft, ask) if ask.streams else None, patience_s=ask.patience_s
                ),
            )
        except UserError as error:
            self._processes.send(self._job, TurnAnswer(turn=ask.turn, repeat=ask.repeat, drawn=error))
            return
        except Exception as error:  # noqa: BLE001 - any error of the session ends the episode
            self._processes.send(self._job, EpisodeCancel())
            self._job.messages.put_nowait(error)
            return
        self._done[ask.turn] = turn
        # The process has the context, and reads the message.
        drawn = replace(turn, prompt_ids=EMPTY_INT, inputs=None, message=NO_MESSAGE, answer=None)
        self._processes.send(self._job, TurnAnswer(turn=ask.turn, repeat=ask.repeat, drawn=drawn))

    def _send_draft(self, ask: TurnAsk, draft: TurnDraft) -> None:
        message = TurnSoFar(turn=ask.turn, repeat=ask.repeat, token_ids=draft.token_ids, text=draft.text)
        self._processes.send(self._job, message)

    async def _hold_wait(self, note: WaitNote) -> None:
        if note.what is None:
            await self._waits.pop(note.number).aclose()
            return
        self._waits[note.number] = stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(self._session.waiting(note.what))

    def outcome(self, end: EpisodeEnd) -> Outcome:
        """Returns the outcome of the episode, and records its rewards and tool calls. Raises its failure."""
        if end.lost:
            raise EpisodeLostError(end.failure)
        if end.outcome is None:
            raise EpisodeFailedError(end.failure, end.cause)
        for number, value in end.rewards.items():
            self._session.reward(self._done[number], value)
        for use in end.tool_uses:
            self._session.take_tool_use(use)
        return end.outcome
