"""Simulating processes. A process that dies or hangs is replaced, and its other episodes are restored.

A process runs its jobs in the order in which they were sent, so the first job without an answer is the running one: if
the process dies or hangs, the episode of that job ends. A new process restores the other episodes by repeating their
starts and chunks, which determine a simulator's state.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

from interlace.core.errors import InterlaceError, UserError
from interlace.robots.envs.load import EnvConfig, check_memory
from interlace.robots.envs.process import NO_JOB, serve_envs
from interlace.rollouts.envs.jobs import EnvBatch, EnvCounts, SlotAnswer, SlotChunk, SlotJob
from interlace.rollouts.envs.spec import EnvSpec, SimulatorError
from interlace.runtime.process.child import frame_message, take_frames
from interlace.runtime.process.children import TRIES, Children
from interlace.runtime.process.links import Child


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """Job of a request, or job that restores an episode."""

    work: SlotJob
    outcome: "Future[object] | None"
    """Receiver of the result; None for a job that restores an episode."""
    number: int = 0
    deadline_s: float = 0.0
    tries: int = TRIES


@dataclass(kw_only=True, slots=True, eq=False)
class _Home:
    """A process and its successors, with the environments that they simulate."""

    index: int
    child: Child | None = None
    waiting: deque[_Job] = field(default_factory=deque)
    """Jobs to send, in order."""
    sent: deque[_Job] = field(default_factory=deque)
    """Jobs without an answer, in order: the first one runs."""
    history: dict[int, list[SlotJob]] = field(default_factory=dict)
    """Slot -> jobs that restore its episode."""
    lost: dict[int, Exception] = field(default_factory=dict)
    """Slot -> reason why its episode could not be restored."""

    def restart_limit(self, timeout_s: float) -> None:
        """Begins the time limit of the job that runs now, if one does."""
        if self.sent:
            self.sent[0].deadline_s = time.monotonic() + timeout_s

    def remember(self, work: SlotJob, value: object) -> None:
        """Adds a job that has succeeded to the jobs that restore the episode of its slot."""
        if work.kind == "reset":
            self.history[work.slot] = [work]
        elif isinstance(value, SlotChunk):
            self.history.get(work.slot, []).append(work)


class EnvPool(Children):
    """Processes for one family of environments. With W processes, slot s is slot s // W of process s modulo W."""

    def __init__(self, config: EnvConfig, devices: Sequence[str] = ()) -> None:
        """devices: names of the devices that the simulators use, such as `cuda:1`. If empty, processor cores."""
        super().__init__("environment", ("interlace.robots.envs.process",))
        self._config, self._devices = config, tuple(devices)
        self.counts = EnvCounts()
        self.spec: Future[EnvSpec] = Future()
        """Shapes and tasks, once a process has created environments; a UserError if that failed."""
        workers = min(config.workers, config.num_envs)
        self._homes = [_Home(index=index) for index in range(workers)]
        self._by_child: dict[Child, _Home] = {}
        self._submitted: deque[_Job | int] = deque()
        self._next = 0
        self._refusal = _find_refusal(config)
        if self._refusal:
            self.spec.set_exception(self._refusal)
        self._thread.start()
        self._links.wake()

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return len(self._homes)

    async def carry_out(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Runs jobs and waits for all. Raises InterlaceError if no process can be started."""
        wave = [_Job(work=job, outcome=Future()) for job in jobs]
        self._submitted.extend(wave)
        self._links.wake()
        futures = [asyncio.wrap_future(each.outcome) for each in wave if each.outcome]
        found = await asyncio.gather(*futures, return_exceptions=True)
        answers = []
        for value in found:
            if isinstance(value, UserError | SimulatorError):
                answers.append(SlotAnswer(error=value))
            elif isinstance(value, BaseException):
                raise value
            else:
                answers.append(SlotAnswer(value=value))
        return EnvBatch(answers=answers, counts=replace(self.counts))

    def submit(self, work: SlotJob) -> "Future[object]":
        """Runs a job after the earlier jobs of its slot; SlotAnswer describes the result."""
        outcome: Future[object] = Future()
        self._submitted.append(_Job(work=work, outcome=outcome))
        self._links.wake()
        return outcome

    def forget(self, slot: int) -> None:
        """Ends the episode of a slot, so that it is no longer restored."""
        self._submitted.append(slot)

    def _find_home(self, slot: int) -> _Home:
        return self._homes[slot % len(self._homes)]

    def _patience_s(self) -> float | None:
        deadlines = [home.sent[0].deadline_s for home in self._homes if home.sent]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _serve(self) -> None:
        while self._submitted:
            item = self._submitted.popleft()
            if isinstance(item, int):
                self._find_home(item).history.pop(item, None)
            else:
                self._find_home(item.work.slot).waiting.append(item)
        for home in self._homes:
            self._keep_limit(home)
            self._hand_out(home)

    def _hand_out(self, home: _Home) -> None:
        if self._refusal:
            for job in home.waiting:
                _settle_job(job, self._refusal)
            home.waiting.clear()
        elif home.child is None:
            config, num_own = self._config, len(range(home.index, self._config.num_envs, len(self._homes)))
            home.child = self._start(serve_envs, config.family, config.settings, num_own, self._devices)
            if home.child:
                self._by_child[home.child] = home
        elif home.child.is_ready and home.waiting:
            # All frames are sent together, so that a process that steps many environments at once receives all of them.
            content = b"".join([self._frame_job(home, home.waiting.popleft()) for _ in range(len(home.waiting))])
            self._links.send(home.child, content)

    def _frame_job(self, home: _Home, job: _Job) -> bytes:
        """Returns a job as bytes to send; empty if it is settled without being sent."""
        lost = home.lost.pop(job.work.slot, None)
        if lost and job.work.kind != "reset":
            _settle_job(job, lost)
            return b""
        if job.outcome is not None and not _may_settle(job):
            return b""  # its episode was cancelled
        job.number, self._next = self._next, (self._next + 1) % NO_JOB
        home.sent.append(job)
        if len(home.sent) == 1:
            home.restart_limit(self._config.timeout_s)
        return frame_message(job.number, replace(job.work, slot=job.work.slot // len(self._homes)))

    def _heard(self, child: Child) -> None:
        home = self._by_child[child]
        for number, content in take_frames(child.received):
            if number == NO_JOB:
                self._handle_introduction(child, content)
                continue
            job = home.sent.popleft()
            if number != job.number:
                raise ValueError(f"answer {number} to job {job.number}")
            home.restart_limit(self._config.timeout_s)
            self._handle_answer(home, job, content)

    def _handle_introduction(self, child: Child, content: EnvSpec | UserError) -> None:
        if isinstance(content, UserError):
            self._refusal = content
            if not self.spec.done():
                self.spec.set_exception(content)
            return
        self._is_ready(child)
        if not self.spec.done():
            self.spec.set_result(content)

    def _handle_answer(self, home: _Home, job: _Job, answer: SlotAnswer) -> None:
        slot = job.work.slot
        self.counts.busy_s += answer.busy_s
        if job.outcome is None:
            if answer.error:
                home.lost[slot] = answer.error
            return
        if isinstance(answer.error, SimulatorError):
            self.counts.num_broken += 1
            home.history.pop(slot, None)
        elif answer.error is None:
            self.counts.add(job.work, answer.value)
            home.remember(job.work, answer.value)
        _settle_job(job, answer.error or answer.value)

    def _keep_limit(self, home: _Home) -> None:
        if home.child and home.sent and home.sent[0].deadline_s <= time.monotonic():
            job = home.sent.popleft()
            self.counts.num_hung += 1
            limit = f"{self._config.timeout_s:g} s"
            self._lose_episode(home, job, SimulatorError(f"the simulator took longer than env.timeout_s = {limit}"))
            self._replace(home, home.child)

    def _handle_death(self, child: Child) -> None:
        code, home = child.find_exit_code(), self._by_child[child]
        if not child.is_ready and self._refusal is None:
            self._record_bad_start(f"it ended with exit code {code} while {self._config.family!r} was made")
        job = home.sent[0] if home.sent else None
        if job:
            job.tries -= 1
            # SIGTERM and SIGKILL come from outside: a stop of the whole run, or the system's lack of memory.
            if code not in (-signal.SIGTERM, -signal.SIGKILL) or not job.tries:
                home.sent.popleft()
                self.counts.num_died += 1
                self._lose_episode(home, job, SimulatorError(f"the simulator's process died (exit code {code})"))
        self._replace(home, child)

    def _lose_episode(self, home: _Home, job: _Job, error: SimulatorError) -> None:
        """Ends the episode that a job belongs to."""
        slot = job.work.slot
        home.history.pop(slot, None)
        if job.outcome is None:
            home.sent = deque(other for other in home.sent if other.outcome or other.work.slot != slot)
            home.lost[slot] = error
        _settle_job(job, error)

    def _replace(self, home: _Home, child: Child) -> None:
        """Ends a process; its successor restores the episodes, then runs the unanswered jobs."""
        unanswered = [job for job in home.sent if job.outcome]
        brought_back = [_Job(work=work, outcome=None) for jobs in home.history.values() for work in jobs]
        self.counts.num_brought_back += len(home.history)
        waiting = [job for job in home.waiting if job.outcome]
        home.waiting = deque([*brought_back, *unanswered, *waiting])
        home.sent.clear()
        home.child = None
        del self._by_child[child]
        self._end(child)

    def _could_not_start(self, reason: str) -> None:
        error = InterlaceError(f"a process to simulate in could not be started: {reason}")
        if not self.spec.done():
            self.spec.set_exception(error)
        for home in self._homes:
            for job in [] if home.child and home.child.is_ready else home.waiting:
                _settle_job(job, error)
            home.waiting.clear()

    def _fail_all(self, error: BaseException | None) -> None:
        for home in self._homes:
            for job in [*home.sent, *home.waiting]:
                _settle_job(job, error or CancelledError())
        for item in self._submitted:
            if isinstance(item, _Job):
                _settle_job(item, error or CancelledError())
        if not self.spec.done():
            self.spec.set_exception(error or CancelledError())


def _find_refusal(config: EnvConfig) -> UserError | None:
    """Returns the reason why the environments of all processes together cannot be created, if it is known before."""
    try:
        check_memory(config)
    except UserError as error:
        return error
    return None


def _may_settle(job: _Job) -> bool:
    """Returns whether a job's result may still be needed; afterwards the job cannot be cancelled."""
    return job.outcome is not None and (job.outcome.running() or job.outcome.set_running_or_notify_cancel())


def _settle_job(job: _Job, result: object) -> None:
    if job.outcome is None or not _may_settle(job):
        return
    if isinstance(result, BaseException):
        job.outcome.set_exception(result)
    else:
        job.outcome.set_result(result)
