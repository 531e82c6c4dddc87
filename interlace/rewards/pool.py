"""Processes that score, each call under a real time limit; one that dies or hangs is replaced."""

import json
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from interlace.core.recovery import Cause, RestartBudget
from interlace.core.types import RewardResult
from interlace.rewards.base import make_timeout_result, preload_modules
from interlace.rewards.config import RewardConfig
from interlace.rewards.process import BLOCKED, READY, RESULT, STARTED, UNREADABLE, serve
from interlace.rewards.signature import ScoreRequest
from interlace.runtime.process.child import frame_message
from interlace.runtime.process.links import Child
from interlace.runtime.process.pool import (
    FROM_OUTSIDE,
    TRIES,
    ProcessJob,
    ProcessPool,
    claim_outcome,
    list_jobs,
    settle_outcome,
)

GRACE_S = 1.0
"""Beyond the limit, for a process that keeps it by itself, as one that awaits does."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Job(ProcessJob):
    """Samples that are scored by one call: one, or a batch."""

    size: int
    """Number of samples."""
    request: bytes
    """Framed."""
    outcome: "Future[list[RewardResult]]"
    started: bool = False
    """Flag: the process has begun the job."""
    alone: bool = False
    """Flag: no other job may run at the same time: if several ran in a process that died, one is to blame."""
    tries: int = TRIES
    """Ends by SIGTERM or SIGKILL that are left before the sample counts as failed."""


class ScoringPool(ProcessPool[_Job, _Job]):
    """Processes of one reward function."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        is_async: bool,
        shares_process: bool = True,
        restarts_per_hour: int | None = None,
    ) -> None:
        """An `async def` has one process, which awaits `config.workers` calls at once; other calls do not share one.

        shares_process: False for functions that are awaited and also compute, which would delay one another.
        """
        budget = RestartBudget("reward", restarts_per_hour)
        super().__init__("reward", ("interlace.rewards.process", *preload_modules(config)), budget=budget)
        self._config, self._is_async = config, is_async
        shares_process &= is_async
        self._max_processes = 1 if shares_process else max(1, config.workers)
        self._max_jobs = max(1, config.workers) if shares_process else 1
        self._pending: deque[_Job] = deque()
        self._next = 0
        self._thread.start()

    def submit(self, requests: Sequence[ScoreRequest]) -> "Future[list[RewardResult]]":
        """Scores responses together as soon as a process has room. The result holds one for each request."""
        frame = frame_message(self._next, tuple(requests))
        job = _Job(number=self._next, size=len(requests), request=frame, outcome=Future())
        self._next += 1
        self._submit(job)
        return job.outcome

    def _fail_all(self, error: BaseException | None) -> None:
        for job in [*self._pending, *self._submitted, *list_jobs(self._jobs)]:
            settle_outcome(job.outcome, error or CancelledError())

    def _accept(self, submitted: _Job) -> None:
        self._pending.append(submitted)

    def _hand_out(self) -> None:
        while self._pending:
            job = self._pending[0]
            child = self._with_room(job)
            if child is None:
                return
            self._pending.popleft()
            if claim_outcome(job.outcome):
                self._send_job(child, job)

    def _with_room(self, job: _Job) -> Child | None:
        for child in self._children:
            jobs = self._jobs[child]
            is_alone = job.alone or any(other.alone for other in jobs.values())
            if child.is_ready and len(jobs) < (1 if is_alone else self._max_jobs):
                return child
        num_starting = sum(not child.is_ready for child in self._children)
        num_wanted = -(-len(self._pending) // self._max_jobs)
        for _ in range(min(num_wanted - num_starting, self._max_processes - len(self._children))):
            self._start(serve, self._config, self._is_async)
        return None

    def _could_not_start(self, reason: str) -> None:
        jobs, self._pending = self._pending, deque()
        for job in jobs:
            _resolve_job(
                job,
                RewardResult(failure=f"a process to score it in could not be started: {reason}", cause=Cause.RESOURCE),
            )

    def _send_job(self, child: Child, job: _Job) -> None:
        job.started, job.deadline_s = False, time.monotonic() + self._limit_s
        self._jobs[child][job.number] = job
        self._links.send(child, job.request)

    @property
    def _limit_s(self) -> float:
        return self._config.timeout_s + (GRACE_S if self._is_async else 0.0)

    def _heard(self, child: Child) -> None:
        *lines, child.received = child.received.split(b"\n")
        for line in lines:
            self._handle_answer(child, *json.loads(line))

    def _handle_answer(self, child: Child, word: str, number: int = -1, *rest: Any) -> None:
        if word == READY:
            self._is_ready(child)
        elif word == STARTED:
            job = self._jobs[child][number]
            job.started, job.deadline_s = True, time.monotonic() + self._limit_s
        elif word == RESULT:
            found = [
                RewardResult(reward=reward, parts=parts, failure=why, cause=Cause(cause))
                for reward, parts, why, cause in rest[0]
            ]
            job = self._jobs[child].pop(number)
            if job.size == len(found):
                settle_outcome(job.outcome, found)
        elif word == BLOCKED:
            _resolve_job(self._jobs[child].pop(number), self._make_blocked_result(*rest))
            self._replace(child)
        elif word == UNREADABLE:
            reason = f"its row cannot be unpickled in the process that scores: {rest[0]}"
            _resolve_job(self._jobs[child].pop(number), RewardResult(failure=reason, cause=Cause.USER))

    def _make_blocked_result(self, where: str) -> RewardResult:
        reason = make_timeout_result(self._config).failure
        return RewardResult(failure=f"{reason}: it blocked its event loop, at {where}. An async reward must await")

    def _handle_late(self, child: Child, late: Sequence[_Job]) -> None:
        # The process keeps the limit of each call itself. If it did not, its event loop is blocked, and any call that
        # runs there may block it: the late one is only the one that began first.
        suspects = [job for job in self._jobs[child].values() if job.started] or late
        self._blame_suspects(child, suspects, lambda _job: make_timeout_result(self._config))
        self._replace(child)

    def _handle_death(self, child: Child) -> None:
        code = child.find_exit_code()
        if not child.is_ready:
            self._record_bad_start(f"it ended with exit code {code} while {self._config.name!r} was loaded")

        def outcome(job: _Job) -> RewardResult | None:
            job.tries -= 1
            if code in FROM_OUTSIDE and job.tries:
                return None
            cause = Cause.RESOURCE if code == -signal.SIGKILL else Cause.VERIFIER
            failure = f"the reward function ended its process (exit code {code})"
            return RewardResult(failure=failure, cause=cause)

        jobs = [*self._jobs[child].values()]
        self._blame_suspects(child, [job for job in jobs if job.started], outcome)
        if not any(job.started for job in jobs):
            self._count_death(child, jobs)
        self._replace(child)

    def _count_death(self, child: Child, unstarted: Sequence[_Job]) -> None:
        """Fails the jobs whose last try was a process that ended before it began one; tries the others alone."""
        for job in unstarted:
            job.tries, job.alone = job.tries - 1, True
            if not job.tries:
                reason = f"{TRIES} processes ended before they began to score it"
                _resolve_job(self._jobs[child].pop(job.number), RewardResult(failure=reason, cause=Cause.RESOURCE))

    def _blame_suspects(
        self, child: Child, suspects: Sequence[_Job], outcome: "Callable[[_Job], RewardResult | None]"
    ) -> None:
        """Resolves a single suspect, which is known to be to blame; tries several again, each alone."""
        if len(suspects) == 1:
            result = outcome(suspects[0])
            if result is not None:
                _resolve_job(self._jobs[child].pop(suspects[0].number), result)
            return
        for job in suspects:
            job.alone = True

    def _replace(self, child: Child) -> None:
        self._pending.extendleft(reversed(self._end(child)))


def _resolve_job(job: _Job, result: RewardResult) -> None:
    """Ends a job whose samples all have one result: the failure of their call."""
    settle_outcome(job.outcome, [result] * job.size)
