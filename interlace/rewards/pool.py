"""Processes that score, each call under a real time limit; one that dies or hangs is replaced."""

import json
import multiprocessing
import pickle
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from typing import Any

from interlace.core.types import RewardResult
from interlace.rewards.base import RewardConfig, ScoreRequest, preload_modules, timed_out
from interlace.rewards.process import BLOCKED, HEAD, READY, RESULT, STARTED, serve

TRIES = 3
"""Starts of a process in a row that come to nothing, and ends by SIGTERM of one sample, before it counts as failed."""
GRACE_S = 1.0
"""Beyond the limit, for a process that keeps it by itself, as one that awaits does."""
_JOIN_S = 2.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """A sample to score."""

    number: int
    request: bytes
    """Pickled."""
    outcome: "Future[RewardResult]"
    deadline_s: float = 0.0
    started: bool = False
    """Flag: the process said that it began the job."""
    alone: bool = False
    """Flag: no other job may run beside this one: of several that ran in a process that died, one is to blame."""
    tries: int = TRIES


@dataclass(kw_only=True, slots=True, eq=False)
class _Scoring:
    """A process, and what it does."""

    process: Any
    connection: socket.socket
    ready: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    """Flag: what is unsent waits for room in the connection."""


class ScoringPool:
    """Processes of one reward function, driven by a thread: limits hold whatever the caller's event loop does."""

    def __init__(self, config: RewardConfig, *, is_async: bool) -> None:
        """An `async def` has one process, where `config.workers` calls are awaited at once; else each has its own."""
        self._config, self._is_async = config, is_async
        self._max_processes = 1 if is_async else max(1, config.workers)
        self._max_jobs = max(1, config.workers) if is_async else 1
        # Forked from a clean server: a process starts in milliseconds, also after a time limit ended the last one, and
        # never inherits this process's torch threads or memory.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["interlace.rewards.process", *preload_modules(config.name)])
        self._submitted: deque[_Job] = deque()
        self._pending: deque[_Job] = deque()
        self._processes: list[_Scoring] = []
        self._next = 0
        self._num_bad_starts = 0
        self._closed = False
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name="reward pool", daemon=True)
        self._thread.start()

    def submit(self, request: ScoreRequest) -> "Future[RewardResult]":
        """Scores one response as soon as a process has room."""
        job = _Job(number=self._next, request=pickle.dumps(request), outcome=Future())
        self._next += 1
        self._submitted.append(job)
        self._wake.send(b"\0")
        return job.outcome

    def close(self) -> None:
        """Ends the processes, with what they are doing."""
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._wakes.close()

    def _work(self) -> None:
        error: BaseException = CancelledError()
        try:
            while not self._closed:
                self._serve_once()
        except Exception as bug:  # noqa: BLE001 - it is raised where the results are awaited
            error, self._closed = bug, True
        jobs = [*self._pending, *self._submitted, *(job for each in self._processes for job in each.jobs.values())]
        for scoring in [*self._processes]:
            self._end(scoring)
        for job in jobs:
            if _may_resolve(job):
                job.outcome.set_exception(error)
        self._selector.close()

    def _serve_once(self) -> None:
        touched: dict[_Scoring, bool] = {}
        for key, _ in self._selector.select(self._patience_s()):
            if key.data is None:
                self._wakes.recv(1 << 16)
            else:
                touched[key.data] = touched.get(key.data, False) or key.fileobj is not key.data.connection
        for scoring, has_ended in touched.items():
            self._hear(scoring, has_ended=has_ended)
        while self._submitted:
            self._pending.append(self._submitted.popleft())
        self._keep_limits()
        self._hand_out()

    def _patience_s(self) -> float | None:
        deadlines = [job.deadline_s for scoring in self._processes for job in scoring.jobs.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _hand_out(self) -> None:
        while self._pending:
            job = self._pending[0]
            scoring = self._with_room(job)
            if scoring is None:
                return
            self._pending.popleft()
            if _may_resolve(job):
                self._send(scoring, job)

    def _with_room(self, job: _Job) -> _Scoring | None:
        for scoring in self._processes:
            is_alone = job.alone or any(other.alone for other in scoring.jobs.values())
            if scoring.ready and len(scoring.jobs) < (1 if is_alone else self._max_jobs):
                return scoring
        num_starting = sum(not scoring.ready for scoring in self._processes)
        num_wanted = -(-len(self._pending) // self._max_jobs)
        for _ in range(min(num_wanted - num_starting, self._max_processes - len(self._processes))):
            self._start()
        return None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            _start_server()
            process = self._context.Process(
                target=serve, args=(theirs, self._config, self._is_async), name="reward", daemon=True
            )
            process.start()
        except (OSError, EOFError) as error:
            ours.close()
            self._started_badly(str(error))
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        scoring = _Scoring(process=process, connection=ours)
        self._processes.append(scoring)
        self._selector.register(ours, selectors.EVENT_READ, scoring)
        # A child of the function's own may hold the connection open longer than the process lives.
        self._selector.register(process.sentinel, selectors.EVENT_READ, scoring)

    def _started_badly(self, reason: str) -> None:
        self._num_bad_starts += 1
        if self._num_bad_starts < TRIES:
            return
        self._num_bad_starts = 0
        jobs, self._pending = self._pending, deque()
        for job in jobs:
            _resolve(job, RewardResult(failure=f"a process to score it in could not be started: {reason}"))

    def _send(self, scoring: _Scoring, job: _Job) -> None:
        job.started, job.deadline_s = False, time.monotonic() + self._limit_s
        scoring.jobs[job.number] = job
        scoring.unsent += HEAD.pack(job.number, len(job.request)) + job.request
        self._flush(scoring)

    @property
    def _limit_s(self) -> float:
        return self._config.timeout_s + (GRACE_S if self._is_async else 0.0)

    def _flush(self, scoring: _Scoring) -> None:
        is_full = False
        try:
            while scoring.unsent:
                del scoring.unsent[: scoring.connection.send(scoring.unsent)]
        except BlockingIOError:
            is_full = True
        except OSError:  # it is gone, which reading will tell
            scoring.unsent.clear()
        if is_full != scoring.is_full:
            scoring.is_full = is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
            self._selector.modify(scoring.connection, events, scoring)

    def _hear(self, scoring: _Scoring, *, has_ended: bool) -> None:
        """Takes in what a process sent, before it ended too."""
        try:
            while part := scoring.connection.recv(1 << 16):
                scoring.received += part
            has_ended = True
        except BlockingIOError:  # that was all so far
            pass
        except OSError:
            has_ended = True
        *lines, scoring.received = scoring.received.split(b"\n")
        try:
            for line in lines:
                self._answered(scoring, *json.loads(line))
        except (ValueError, TypeError, KeyError):  # the function wrote on the connection
            has_ended = True
        if scoring not in self._processes:
            return  # what it said ended it
        if has_ended:
            self._died(scoring)
        else:
            self._flush(scoring)

    def _answered(self, scoring: _Scoring, word: str, number: int = -1, *rest: Any) -> None:
        if word == READY:
            scoring.ready, self._num_bad_starts = True, 0
        elif word == STARTED:
            job = scoring.jobs[number]
            job.started, job.deadline_s = True, time.monotonic() + self._limit_s
        elif word == RESULT:
            reward, parts, failure = rest
            _resolve(scoring.jobs.pop(number), RewardResult(reward=reward, parts=parts, failure=failure))
        elif word == BLOCKED:
            _resolve(scoring.jobs.pop(number), self._blocked(*rest))
            self._replace(scoring)

    def _blocked(self, where: str) -> RewardResult:
        reason = timed_out(self._config).failure
        return RewardResult(failure=f"{reason}: it blocked its event loop, at {where}. An async reward must await")

    def _keep_limits(self) -> None:
        now_s = time.monotonic()
        for scoring in [*self._processes]:
            late = [job for job in scoring.jobs.values() if job.deadline_s <= now_s]
            if not late:
                continue
            self._blame(scoring, late, lambda _job: timed_out(self._config))
            self._replace(scoring)

    def _died(self, scoring: _Scoring) -> None:
        scoring.process.join(_JOIN_S)
        code = scoring.process.exitcode
        if not scoring.ready:
            self._started_badly(f"it ended with exit code {code} while {self._config.name!r} was loaded")

        def outcome(job: _Job) -> RewardResult | None:
            job.tries -= 1
            # A stop may send SIGTERM to all processes of a run: the step that the run ends with needs its scores.
            if code == -signal.SIGTERM and job.tries:
                return None
            return RewardResult(failure=f"the reward function ended its process (exit code {code})")

        self._blame(scoring, [job for job in scoring.jobs.values() if job.started], outcome)
        self._replace(scoring)

    def _blame(self, scoring: _Scoring, suspects: list[_Job], outcome: "Callable[[_Job], RewardResult | None]") -> None:
        """Resolves a single suspect, which is known to be to blame; tries several again, each alone."""
        if len(suspects) == 1:
            result = outcome(suspects[0])
            if result is not None:
                _resolve(scoring.jobs.pop(suspects[0].number), result)
            return
        for job in suspects:
            job.alone = True

    def _replace(self, scoring: _Scoring) -> None:
        """Ends a process; what it has not finished is scored by others."""
        self._pending.extendleft(reversed(scoring.jobs.values()))
        self._end(scoring)

    def _end(self, scoring: _Scoring) -> None:
        self._processes.remove(scoring)
        self._selector.unregister(scoring.connection)
        self._selector.unregister(scoring.process.sentinel)
        scoring.process.kill()
        scoring.connection.close()
        scoring.process.join(_JOIN_S)


def _may_resolve(job: _Job) -> bool:
    """Says whether a job's result may still be wanted; from now on the job cannot be cancelled."""
    return job.outcome.running() or job.outcome.set_running_or_notify_cancel()


def _resolve(job: _Job, result: RewardResult) -> None:
    if _may_resolve(job):
        job.outcome.set_result(result)


def _start_server() -> None:
    """Starts the server deaf to SIGTERM, which a whole run may get: without the server no process can start."""
    resource_tracker.ensure_running()  # where the server started it, it would undo the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
