"""The process that runs many episodes concurrently. It requests their turns from the run by messages.

Episodes are code of the user, never code that a model wrote, so the run may unpickle their messages.
"""

import asyncio
import contextlib
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from interlace.core.errors import EpisodeLostError, UserError
from interlace.core.progress import Draft
from interlace.core.recovery import Cause
from interlace.core.types import Inputs, IntArray, Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.observe.films import Film
from interlace.rollouts.base import Episode, Filming, Outcome, ToolUse, Turn
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.episode_envs import EnvAnswer, EnvAsk, EnvProxies
from interlace.rollouts.generate import outcome_of, sample_failure
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.runtime.process.child import LoopServer, become_child, frame_message
from interlace.runtime.waits import LoopClock, WaitRegistry

NO_EPISODE = 0xFFFFFFFF
"""Number of the first message of a process, which contains None or the UserError that prevents its start."""
BLOCKED_AFTER_S = 30.0
"""Maximum time, in seconds, that an episode may block the event loop of its process, unless its time limit is less."""
LEAVE_S = 5.0
"""Maximum time, in seconds, of a cancelled episode to end before its process is replaced."""


def patience_s(timeout_s: float) -> float:
    """Returns the run's time limit for an episode, which is longer than the limit `timeout_s` in its process."""
    return timeout_s + min(timeout_s, BLOCKED_AFTER_S) + LEAVE_S


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeStart:
    """Message to the process: starts an episode."""

    key: SampleKey
    prompt: Prompt
    params: SamplingParams | None = None
    """Sampling parameters of the session. If None, the run's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeCancel:
    """Message to the process: cancels an episode, which still sends an EpisodeEnd."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnAsk:
    """Message to the run: requests a turn of an episode."""

    turn: int
    repeat: int
    prompt_ids: Sequence[int] | IntArray
    params: SamplingParams | None
    """Sampling parameters. If None, the session's."""
    inputs: Inputs | None = None
    query_ids: Sequence[int] = ()
    streams: bool = False
    """These three fields, and `repeat`: see Request."""
    patience_s: float = math.inf
    """Limit of the wait for new weights; see TurnOptions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnAnswer:
    """Message to the process: a requested turn, or the reason why it failed."""

    turn: int
    repeat: int
    """See Request. The answer may arrive after the episode has withdrawn the turn and requested it again."""
    drawn: Turn | UserError
    """The turn without its context and message, or the error that it raised."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnSoFar:
    """Message to the process: the tokens so far of a turn that streams."""

    turn: int
    repeat: int
    token_ids: Sequence[int]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnWithdraw:
    """Message to the run: withdraws a requested or finished turn."""

    turn: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WaitNote:
    """Message to the run: start or end of a wait that the episode named."""

    number: int
    what: str | None
    """Name of the wait at its start. None at its end."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeEnd:
    """Message to the run: the end of an episode."""

    outcome: Outcome | None = None
    failure: str = ""
    """Reason why the episode has no outcome."""
    cause: Cause = Cause.USER
    """Cause of the failure."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by turn."""
    tool_uses: Sequence[ToolUse] = ()
    lost: bool = False
    """True if the sample may start again, because a simulator of the episode failed."""
    blocked: bool = False
    """True if the episode blocks the event loop, so that the process must be replaced."""
    films: Sequence[Film] = ()
    """Films that were recorded in the process since the last EpisodeEnd."""
    why_no_films: str = ""
    """Reason why films could not be recorded, or an empty text."""


FromEpisode: TypeAlias = TurnAsk | TurnWithdraw | EnvAsk | WaitNote | EpisodeEnd
ToEpisode: TypeAlias = EpisodeStart | EpisodeCancel | TurnSoFar | TurnAnswer | EnvAnswer
MakeEpisode: TypeAlias = Callable[[], tuple[Episode, SessionLimits]]


def serve_episodes(connection: socket.socket, make: MakeEpisode, params: SamplingParams) -> None:
    """Serves the run in the process, until the run ends or closes the connection. make: picklable, called once."""
    become_child()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            episode, limits = make()
        except UserError as error:
            connection.sendall(frame_message(NO_EPISODE, error))
            return
        connection.sendall(frame_message(NO_EPISODE, None))
        _EpisodeServer(connection, episode, limits, params).run()


class _Around:
    """Clock and wait registry of the sessions in this process."""

    def __init__(self, server: "_EpisodeServer", number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = LoopClock(loop)
        self.waits = WaitRegistry(self.clock)
        self._server, self._number, self._numbers = server, number, count()

    @asynccontextmanager
    async def waiting(self, who: str, what: str) -> AsyncIterator[None]:  # noqa: ARG002 - the run adds the name
        number = next(self._numbers)
        self._server.send(self._number, WaitNote(number=number, what=what))
        try:
            yield
        finally:
            self._server.send(self._number, WaitNote(number=number, what=None))


class _Running:
    """One running episode, and the client of its session, which sends requests to the run."""

    def __init__(self, server: "_EpisodeServer", number: int, params: SamplingParams) -> None:
        self._server, self._number, self.params = server, number, params
        self._answers: dict[tuple[int, int], asyncio.Future[Turn]] = {}
        """Requested turns, by number and repeat."""
        self._listeners: dict[tuple[int, int], Callable[[TurnSoFar], None]] = {}
        self.envs = EnvProxies(partial(server.send, number))
        self.task: asyncio.Task[None] | None = None

    async def __call__(
        self,
        request: Request,
        *,
        who: str,  # noqa: ARG002 - the run adds the name
        what: str,  # noqa: ARG002 - as above
        on_draft: OnDraft | None = None,
        patience_s: float = math.inf,
    ) -> Response:
        answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        key = request.turn, request.repeat
        self._answers[key] = answer
        params = None if request.params is self.params else request.params
        ask = TurnAsk(
            turn=request.turn,
            repeat=request.repeat,
            prompt_ids=request.prompt_ids,
            params=params,
            inputs=request.inputs,
            query_ids=request.query_ids,
            streams=request.streams,
            patience_s=patience_s,
        )
        if on_draft:
            self._listeners[key] = partial(_pass_on, request.id, on_draft)
        self._server.send(self._number, ask)
        try:
            drawn = await answer
        except asyncio.CancelledError:
            self._server.send(self._number, TurnWithdraw(turn=request.turn))
            raise
        finally:
            del self._answers[key]
            self._listeners.pop(key, None)
        return Response(
            request=request,
            token_ids=drawn.token_ids.tolist(),
            logprobs=drawn.logprobs.tolist(),
            versions=drawn.versions,
            finish_reason=drawn.finish_reason,
            num_cached_tokens=drawn.num_cached_tokens,
            text=drawn.text,
        )

    def set_partial(self, found: TurnSoFar) -> None:
        """Passes an incomplete turn to its listener, if the turn is awaited."""
        if listener := self._listeners.get((found.turn, found.repeat)):
            listener(found)

    def set_answer(self, answer: TurnAnswer) -> None:
        """Sets the result of a turn, if the turn is awaited."""
        waiting = self._answers.get((answer.turn, answer.repeat))
        if waiting is None or waiting.done():
            return
        if isinstance(answer.drawn, UserError):
            waiting.set_exception(answer.drawn)
        else:
            waiting.set_result(answer.drawn)


def _pass_on(request_id: str, on_draft: OnDraft, found: TurnSoFar) -> None:
    on_draft(Draft(request_id=request_id, token_ids=found.token_ids, text=found.text))


class _EpisodeServer(LoopServer):
    """Runs episodes on one event loop. A thread monitors the loop for blocking episodes."""

    def __init__(
        self, connection: socket.socket, episode: Episode, limits: SessionLimits, params: SamplingParams
    ) -> None:
        super().__init__(connection, min(BLOCKED_AFTER_S, limits.timeout_s))
        self._writing = threading.Lock()
        self._episode, self._limits, self._params = episode, limits, params
        self._running: dict[int, _Running] = {}

    def send(self, number: int, message: FromEpisode) -> None:
        """Sends a message about an episode to the run. Thread-safe."""
        content = frame_message(number, message)
        with self._writing:
            self._connection.sendall(content)

    def _heard(self, number: int, message: ToEpisode) -> None:
        if isinstance(message, EpisodeStart):
            running = self._running[number] = _Running(self, number, message.params or self._params)
            running.task = self._loop.create_task(self._run_episode(number, running, message))
            return
        running_one = self._running.get(number)
        if running_one is None:
            return  # the episode ended before the message arrived
        if isinstance(message, TurnAnswer):
            running_one.set_answer(message)
        elif isinstance(message, TurnSoFar):
            running_one.set_partial(message)
        elif isinstance(message, EnvAnswer):
            running_one.envs.take_answer(message)
        elif running_one.task:
            running_one.task.cancel()

    def _refuse(self, number: int, error: Exception) -> None:
        reason = f"a message to its process cannot be unpickled: {type(error).__name__}: {error}"
        running = self._running.get(number)
        if running is not None and running.task:
            running.task.cancel(reason)
        else:
            self.send(number, EpisodeEnd(failure=reason))

    async def _run_episode(self, number: int, running: _Running, start: EpisodeStart) -> None:
        sample = Sample(key=start.key, prompt=start.prompt)
        limits = replace(self._limits, simulators=running.envs)
        session = EpisodeSession(
            _Around(self, number, self._loop),
            running,
            sample,
            running.params,
            limits,
            on_withdrawn=lambda turn: self.send(number, TurnWithdraw(turn=turn)),
        )
        session.begin()
        try:
            outcome = outcome_of(await session.limit_time(self._episode.run(start.prompt, session)))
            end = EpisodeEnd(outcome=outcome, rewards=session.rewards, tool_uses=session.tool_uses)
        except asyncio.CancelledError as error:
            end = EpisodeEnd(failure=str(error) or "it was cancelled")
        except EpisodeLostError as error:
            end = EpisodeEnd(failure=str(error), lost=True)
        except Exception as error:  # noqa: BLE001 - any error of a user's episode ends only its sample
            failed = sample_failure(error)
            end = EpisodeEnd(failure=failed.reason, cause=failed.cause)
        session.close()
        del self._running[number]
        if end.outcome is not None and isinstance(self._episode, Filming):
            end = replace(end, films=self._episode.films(), why_no_films=self._episode.why_no_films())
        self.send(number, end)

    def _report_blocked_loop(self, task: asyncio.Task[Any] | None, line: str) -> None:
        for number, running in [*self._running.items()]:
            if running.task is task:
                reason = f"the episode blocked its event loop for {self._patience_s:g} s, at {line}"
                hint = "await there, or leave it to a thread (asyncio.to_thread)"
                self.send(number, EpisodeEnd(failure=f"TimeoutError: {reason}: {hint}", blocked=True))
                return
        os._exit(1)  # an unknown task blocks the loop: the run restarts the lost episodes, the last time each alone
