"""Simulating processes. A process that dies or hangs is replaced, and its other episodes are restored.

A process runs its jobs in the order in which they were sent, so the first job without an answer is the running one: if
the process dies or hangs, the episode of that job ends. A new process restores the other episodes by repeating their
starts and chunks, which determine a simulator's state.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from interlace.core.errors import InterlaceError, UserError
from interlace.robots.envs.load import EnvConfig, check_memory
from interlace.robots.envs.process import NO_JOB, PREPARED, serve_envs
from interlace.rollouts.envs.spec import (
    EnvBatch,
    EnvCounts,
    EnvSpec,
    EpisodeHistory,
    SimulatorError,
    SlotAnswer,
    SlotJob,
)
from interlace.runtime.process.child import frame_message, take_frames
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

START_WITHIN_S = 600.0
"""Time limit, in seconds, of the start of a process with its environments. Simulators that compile need minutes."""


class _Batch:
    """Results of the jobs of one call. The caller's event loop wakes once, after the last of them."""

    def __init__(self, num_jobs: int) -> None:
        self.outcome: Future[list[object]] = Future()
        """Receiver of all results; each may be an exception."""
        self._results: list[object] = [None] * num_jobs
        self._num_left = num_jobs

    def settle(self, place: int, result: object) -> None:
        """Stores the result of a job. place: index of the job."""
        self._results[place] = result
        self._num_left -= 1
        if not self._num_left:
            settle_outcome(self.outcome, self._results)


@dataclass(kw_only=True, slots=True, eq=False)
class _Job(ProcessJob):
    """Job of a request, or job that restores an episode. Its time limit begins when it is the first in its process."""

    work: SlotJob
    batch: _Batch | None = None
    """Receiver of the result; None for a job that restores an episode."""
    place: int = 0
    """Index in the batch."""
    tries: int = TRIES


@dataclass(kw_only=True, slots=True, eq=False)
class _Home:
    """A process and its successors, with the environments that they simulate."""

    index: int
    child: Child | None = None
    ready_by_s: float = 0.0
    """Time at which a process that is not ready is given up."""
    waiting: deque[_Job] = field(default_factory=deque)
    """Jobs to send, in order."""
    history: EpisodeHistory = field(default_factory=EpisodeHistory)
    lost: dict[int, Exception] = field(default_factory=dict)
    """Slot -> reason why its episode could not be restored."""


class EnvPool(ProcessPool[_Job, Sequence[_Job] | int]):
    """Processes for one family of environments. With W processes, slot s is slot s // W of process s modulo W.

    The thread gets jobs, and the slots of episodes that have ended.
    """

    def __init__(self, config: EnvConfig, devices: Sequence[str] = ()) -> None:
        """devices: names of the devices that the simulators use, such as `cuda:1`. If empty, processor cores."""
        super().__init__("environment", ("interlace.robots.envs.process",))
        self._config, self._devices = config, tuple(devices)
        self.num_envs, self.counts = config.num_envs, EnvCounts()
        self._spec: Future[EnvSpec] = Future()
        """Shapes and tasks, once a process has created environments; a UserError if that failed. Known before a process
        has compiled its simulators."""
        self.num_processes = min(config.workers, config.num_envs)
        self._homes = [_Home(index=index) for index in range(self.num_processes)]
        self._by_child: dict[Child, _Home] = {}
        self._next = 0
        self._refusal: UserError | None = None
        """Reason why the environments of all processes together cannot be created."""
        try:
            check_memory(config)
        except UserError as error:
            self._refusal = error
            self._spec.set_exception(error)
        self._thread.start()
        self._links.wake()

    async def spec(self) -> EnvSpec:
        return await asyncio.shield(asyncio.wrap_future(self._spec))

    async def run_jobs(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Runs jobs and waits for all. Raises InterlaceError if no process can be started."""
        batch, results, answers = _Batch(len(jobs)), list[object](), []
        if jobs:
            self._submit([_Job(work=job, batch=batch, place=place) for place, job in enumerate(jobs)])
            results = await asyncio.wrap_future(batch.outcome)
        for value in results:
            if isinstance(value, UserError | SimulatorError):
                answers.append(SlotAnswer(error=value))
            elif isinstance(value, BaseException):
                raise value
            else:
                answers.append(SlotAnswer(value=value))
        return EnvBatch(answers=answers, counts=replace(self.counts))

    async def do(self, job: SlotJob) -> object:
        [answer] = (await self.run_jobs([job])).answers
        if answer.error:
            raise answer.error
        return answer.value

    def forget(self, slot: int) -> None:
        """Ends the episode of a slot, so that it is no longer restored."""
        self._submitted.append(slot)

    def _find_home(self, slot: int) -> _Home:
        return self._homes[slot % len(self._homes)]

    def _accept(self, submitted: Sequence[_Job] | int) -> None:
        if isinstance(submitted, int):
            self._find_home(submitted).history.forget(submitted)
        else:
            for job in submitted:
                self._find_home(job.work.slot).waiting.append(job)

    def _hand_out(self) -> None:
        late: list[Child] = []
        for home in self._homes:
            if self._refusal:
                for job in home.waiting:
                    _settle_job(job, self._refusal)
                home.waiting.clear()
            elif home.child is None:
                config, num_own = self._config, len(range(home.index, self._config.num_envs, len(self._homes)))
                home.child = self._start(serve_envs, config.family, config.settings, num_own, self._devices)
                home.ready_by_s = time.monotonic() + START_WITHIN_S
                self._by_child[home.child] = home
            elif home.child.is_ready and home.waiting:
                # All frames are sent together, so that a process that steps many environments at once receives all.
                num = len(home.waiting)
                frames = [self._frame_job(home, home.child, home.waiting.popleft()) for _ in range(num)]
                self._links.send(home.child, b"".join(frames))
            elif not home.child.is_ready and home.ready_by_s <= time.monotonic():
                late.append(home.child)
        for child in late:  # after the loop: processes that are ready have got their jobs
            self._could_not_start(f"{self._config.family!r} was not ready within {START_WITHIN_S:g} s")
            self._replace(child)

    def _frame_job(self, home: _Home, child: Child, job: _Job) -> bytes:
        """Returns a job as bytes to send; empty if it is settled without being sent."""
        sent = self._jobs[child]
        lost = home.lost.pop(job.work.slot, None)
        if lost and job.work.kind != "reset":
            _settle_job(job, lost)
            return b""
        if job.batch and not claim_outcome(job.batch.outcome):
            return b""  # the call was cancelled
        job.number, job.deadline_s, self._next = self._next, 0.0, (self._next + 1) % NO_JOB
        sent[job.number] = job
        if len(sent) == 1:
            self._start_limit(sent)
        return frame_message(job.number, replace(job.work, slot=job.work.slot // len(self._homes)))

    def _start_limit(self, sent: dict[int, _Job]) -> None:
        """Begins the time limit of the first job of a process, which runs now."""
        if running := next(iter(sent.values()), None):
            running.deadline_s = time.monotonic() + self._config.timeout_s

    def _heard(self, child: Child) -> None:
        home, sent = self._by_child[child], self._jobs[child]
        for number, content in take_frames(child.received):
            if number == NO_JOB:
                self._handle_introduction(child, content)
                continue
            if number != next(iter(sent), NO_JOB):
                raise ValueError(f"answer {number} is not to the job that runs")
            job = sent.pop(number)
            self._start_limit(sent)
            self._handle_answer(home, job, content)

    def _handle_introduction(self, child: Child, content: EnvSpec | UserError | str) -> None:
        if isinstance(content, EnvSpec):
            if not self._spec.done():
                self._spec.set_result(content)
        elif isinstance(content, UserError):
            self._refusal = content
            if not self._spec.done():
                self._spec.set_exception(content)
        elif content == PREPARED:
            self._is_ready(child)

    def _handle_answer(self, home: _Home, job: _Job, answer: SlotAnswer) -> None:
        slot = job.work.slot
        self.counts.busy_s += answer.busy_s
        if job.batch is None:
            if answer.error:
                home.lost[slot] = answer.error
            return
        if isinstance(answer.error, SimulatorError):
            self.counts.num_broken += 1
        elif answer.error is None:
            self.counts.add(job.work, answer.value)
        home.history.add(job.work, answer)
        _settle_job(job, answer.error or answer.value)

    def _handle_late(self, child: Child, late: Sequence[_Job]) -> None:
        [job] = late
        self.counts.num_hung += 1
        limit = f"{self._config.timeout_s:g} s"
        self._lose_episode(child, job, SimulatorError(f"the simulator took longer than env.timeout_s = {limit}"))
        self._replace(child)

    def _handle_death(self, child: Child) -> None:
        code = child.find_exit_code()
        if not child.is_ready and self._refusal is None:
            self._record_bad_start(f"it ended with exit code {code} while {self._config.family!r} was made")
        if job := next(iter(self._jobs[child].values()), None):
            job.tries -= 1
            if code not in FROM_OUTSIDE or not job.tries:
                self.counts.num_died += 1
                self._lose_episode(child, job, SimulatorError(f"the simulator's process died (exit code {code})"))
        self._replace(child)

    def _lose_episode(self, child: Child, job: _Job, error: SimulatorError) -> None:
        """Ends a job and the episode that it belongs to."""
        home, slot = self._by_child[child], job.work.slot
        home.history.forget(slot)
        del self._jobs[child][job.number]
        if job.batch is None:
            home.lost[slot] = error
        _settle_job(job, error)

    def _replace(self, child: Child) -> None:
        """Ends a process; its successor restores the episodes, then runs the unanswered jobs."""
        home = self._by_child.pop(child)
        unanswered = [job for job in self._end(child) if job.batch]
        brought_back = [_Job(work=work) for work in home.history.list_jobs()]
        self.counts.num_brought_back += len(home.history)
        waiting = [job for job in home.waiting if job.batch]
        home.waiting = deque([*brought_back, *unanswered, *waiting])
        home.child = None

    def _could_not_start(self, reason: str) -> None:
        error = InterlaceError(f"a process to simulate in could not be started: {reason}")
        if not self._spec.done():
            self._spec.set_exception(error)
        for home in self._homes:
            if home.child and home.child.is_ready:
                continue  # it gets its waiting jobs next
            for job in home.waiting:
                _settle_job(job, error)
            home.waiting.clear()

    def _fail_all(self, error: BaseException | None) -> None:
        waiting = [job for home in self._homes for job in home.waiting]
        submitted = [job for item in [*self._submitted] if not isinstance(item, int) for job in item]
        for job in [*list_jobs(self._jobs), *waiting, *submitted]:
            _settle_job(job, error or asyncio.CancelledError())
        if not self._spec.done():
            self._spec.set_exception(error or asyncio.CancelledError())


def _settle_job(job: _Job, result: object) -> None:
    if job.batch:
        job.batch.settle(job.place, result)
