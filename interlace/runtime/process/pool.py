"""Pool of processes that do jobs for this one, each over a socket: started on separate threads from a fork server."""

import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from interlace.core.errors import InterlaceError, RestartBudgetError
from interlace.core.processes import kill_if_stopped
from interlace.core.recovery import Cause, RestartBudget
from interlace.runtime.process.launch import GUARD, fork_servers
from interlace.runtime.process.links import Child, ChildLinks

FIRST_START_S, START_S = 120.0, 20.0
"""Seconds for the start of a process. The first start takes longer, because the fork server imports modules."""
LOOK_S = 1.0
"""Seconds between two looks for processes that a signal has stopped."""
Place: TypeAlias = Callable[[str, Callable[..., None], tuple[object, ...]], tuple[Any, socket.socket]]
"""Starts a named process that runs target(connection, *arguments). Returns the process and this end of the connection.
Raises OSError if the start fails."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProcessLaunch:
    """Result of the start of a process."""

    child: Child
    process: Any = None
    connection: socket.socket | None = None
    error: Exception | None = None


class ProcessStarts:
    """Starts processes, here by a fork server or elsewhere by a function.

    Each start uses a separate thread: a fork server that does not answer delays neither time limits nor an end.
    """

    def __init__(self, name: str, preload: tuple[str, ...], place: Place | None, on_launch: Callable[[], None]) -> None:
        """name: of the processes. preload: modules that the fork server imports. place: if None, starts here.

        on_launch: called on a start's thread once take() returns its result.
        """
        self._name, self._place, self._on_launch = name, place, on_launch
        self._servers = fork_servers(preload)
        self._launched: deque[ProcessLaunch] = deque()
        self._launching = threading.Lock()

    @property
    def are_local(self) -> bool:
        """True if the processes start on this machine."""
        return self._place is None

    def begin(self, target: Callable[..., None], args: tuple[object, ...]) -> Child:
        """Begins the start of a process that runs target(connection, *args)."""
        within_s = START_S if self.are_local and self._servers.is_warm else FIRST_START_S
        child = Child(start_by_s=time.monotonic() + within_s)
        threading.Thread(
            target=self._launch, args=(child, target, args), name=f"start of {self._name}", daemon=True
        ).start()
        return child

    def take(self) -> ProcessLaunch | None:
        """Returns the next result of a start, once. Returns None if there is none."""
        return self._launched.popleft() if self._launched else None

    def withdraw(self, child: Child) -> None:
        """Ends the start of a child. If its process has started already, the child gets it, to be killed."""
        with self._launching:
            child.has_ended = True
            waiting = [launch for launch in self._launched if launch.child is child]
        for launch in waiting:  # started, but not yet taken
            self._launched.remove(launch)
            child.process, child.connection = launch.process, launch.connection

    def find_late(self, children: Sequence[Child]) -> Sequence[Child]:
        """Returns the children that have not started in time. Replaces the fork server if there is one."""
        late = [child for child in children if not child.process and child.start_by_s <= time.monotonic()]
        if late and self.are_local:
            self._servers.replace()
        return late

    def _launch(self, child: Child, target: Callable[..., None], args: tuple[object, ...]) -> None:
        """Starts a process. Runs on a thread of its start."""
        place = self._place or self._start_local
        try:
            process, connection = place(self._name, target, args)
            launch = ProcessLaunch(child=child, process=process, connection=connection)
        except Exception as error:  # noqa: BLE001 - the owner's thread handles it
            launch = ProcessLaunch(child=child, error=error)
        with self._launching:
            if not child.has_ended:
                self._launched.append(launch)
                self._on_launch()
                return
        if launch.process:  # it started too late
            launch.process.kill()
        if launch.connection:
            launch.connection.close()

    def _start_local(
        self, name: str, target: Callable[..., None], args: tuple[object, ...]
    ) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._servers.start(name, target, (theirs, *args)), ours
            except BaseException:
                ours.close()
                raise


TRIES = 3
"""Number of consecutive failed starts of a process after which the waiting jobs fail."""


FROM_OUTSIDE = (-signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of a process that was ended from outside: by a stop of the whole run, or for the system's lack of memory.
"""


def claim_outcome(outcome: "Future[Any]") -> bool:
    """Returns whether a job's result may still be needed; afterwards the job cannot be cancelled."""
    # Several jobs may have one outcome: a Future that was cancelled raises at a second call.
    return outcome.running() or (not outcome.cancelled() and outcome.set_running_or_notify_cancel())


def settle_outcome(outcome: "Future[Any]", result: object) -> None:
    """Sets the result of a job, which may be an exception. Does nothing if the job was cancelled."""
    if not claim_outcome(outcome):
        return
    if isinstance(result, BaseException):
        outcome.set_exception(result)
    else:
        outcome.set_result(result)


@dataclass(kw_only=True, slots=True, eq=False)
class ProcessJob:
    """Job of a process."""

    number: int = 0
    """Number of the job within its pool."""
    deadline_s: float = 0.0
    """End of the time limit, on the monotonic clock. 0 while the job has no limit."""


J = TypeVar("J", bound=ProcessJob)
T = TypeVar("T")
"""Jobs, and messages about them, that callers submit to the thread of a pool."""


def list_jobs(jobs: Mapping[Child, Mapping[int, J]]) -> list[J]:
    """Returns the jobs of all processes."""
    return [job for own in jobs.values() for job in own.values()]


def find_late_jobs(jobs: Mapping[Child, Mapping[int, J]]) -> dict[Child, list[J]]:
    """Returns the jobs that exceed their time limits now, by process."""
    now_s = time.monotonic()
    late = {child: [job for job in own.values() if 0 < job.deadline_s <= now_s] for child, own in jobs.items()}
    return {child: found for child, found in late.items() if found}


class ProcessPool(ABC, Generic[J, T]):
    """Owner of processes. One thread serves them all, so time limits hold even if the caller's event loop is blocked.

    After each event the thread accepts what callers have submitted, handles the jobs that exceed their time limits,
    and gives waiting jobs to processes. Methods that begin with an underscore run on that thread, except `_submit`.
    """

    def __init__(
        self, name: str, preload: tuple[str, ...], place: Place | None = None, budget: RestartBudget | None = None
    ) -> None:
        """name: of the thread and the processes. preload: modules that the fork server imports for all of them.

        place: function that starts a process elsewhere; if None, processes start on this machine. budget: limit of
        restarts; None for no limit.
        """
        self._name, self._budget = name, budget
        self._children: list[Child] = []
        self._jobs: dict[Child, dict[int, J]] = {}
        """Jobs of each process that have not ended, by number, in the order in which they were sent."""
        self._submitted: deque[T] = deque()
        self._links = ChildLinks()
        self._starts = ProcessStarts(name, preload, place, self._links.wake)
        self._next_look_s = 0.0
        self._dying: Child | None = None
        """Process whose end is currently handled."""
        self._num_bad_starts = 0
        self._error: BaseException | None = None
        """Error for jobs that come after the end of the thread; None while it runs."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def close(self) -> None:
        """Ends the processes and their jobs."""
        self._closed = True
        self._links.wake()
        self._thread.join()
        self._links.close()

    @abstractmethod
    def _accept(self, submitted: T) -> None:
        """Queues a submitted job, or acts on a submitted message."""

    @abstractmethod
    def _handle_late(self, child: Child, late: Sequence[J]) -> None:
        """Handles jobs of a process that exceed their time limits."""

    @abstractmethod
    def _hand_out(self) -> None:
        """Gives waiting jobs to processes, and starts processes."""

    @abstractmethod
    def _heard(self, child: Child) -> None:
        """Reads `child.received`. Raises ValueError, TypeError or KeyError for bytes that are not a message."""

    @abstractmethod
    def _handle_death(self, child: Child) -> None:
        """Handles the jobs of a process that ended or could not start; calls `_end` last."""

    @abstractmethod
    def _could_not_start(self, reason: str) -> None:
        """Fails the waiting jobs, after TRIES failed starts in a row."""

    @abstractmethod
    def _fail_all(self, error: BaseException | None) -> None:
        """Fails every job, at the end. error: a fault of this class; None if it was closed."""

    def _submit(self, submitted: T) -> None:
        """Hands a job or a message to the thread. Raises InterlaceError, or the thread's error, if the thread ended."""
        self._submitted.append(submitted)
        if self._error is not None:
            raise self._error
        self._links.wake()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while not self._closed:
                self._listen()
                while self._submitted:
                    self._accept(self._submitted.popleft())
                for child, late in find_late_jobs(self._jobs).items():
                    self._handle_late(child, late)
                self._hand_out()
        except Exception as bug:  # noqa: BLE001 - it is raised to the callers that await results
            error, self._closed = bug, True
        # First: a job that comes later is refused by _submit().
        self._error = error or InterlaceError(f"the processes of {self._name} were closed, and take no further job.")
        self._fail_all(error)
        for child in [*self._children]:
            self._end(child)
        self._links.end_waiting()

    def _patience_s(self) -> float | None:
        """Returns the seconds until the next time limit. None if no limit runs."""
        deadlines = [job.deadline_s for job in list_jobs(self._jobs) if job.deadline_s]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _listen(self) -> None:
        starts = [max(0.0, child.start_by_s - time.monotonic()) for child in self._children if not child.process]
        limit_s = self._patience_s()
        look_s = [LOOK_S] if self._children else []
        seconds = min([*starts, *look_s, *([] if limit_s is None else [limit_s])], default=None)
        for child, has_ended in self._links.wait(seconds).items():
            if child in self._children:
                self._read_process(child, has_ended=has_ended)
        while launch := self._starts.take():
            self._finish_start(launch)
        for child in self._starts.find_late(self._children):
            self._handle_end(child, "the fork server did not answer")
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            for child in self._children:  # a process that a signal has stopped would never answer
                child.was_stopped |= kill_if_stopped(child.process.pid if child.process else None)

    def _start(self, target: Callable[..., None], *args: object) -> Child:
        """Begins the start of a process that runs target(connection, *args)."""
        child = self._starts.begin(target, args)
        self._children.append(child)
        self._jobs[child] = {}
        return child

    def _finish_start(self, launch: ProcessLaunch) -> None:
        if launch.error is not None:
            if not isinstance(launch.error, OSError | EOFError):
                raise launch.error
            self._handle_end(launch.child, str(launch.error) or "the fork server ended")
            return
        assert launch.connection is not None
        self._links.add(launch.child, launch.process, launch.connection)

    def _handle_end(self, child: Child, start_error: str = "") -> None:
        """Handles the end of a process. start_error: reason why it could not be started, if it was not."""
        self._dying, child.start_error = child, start_error
        self._handle_death(child)
        self._dying = None
        if self._budget and (reason := self._budget.spend(time.monotonic())):
            raise RestartBudgetError(f"{reason} (cause: {Cause.RESOURCE}). The last process {child.last_words}.")

    def _record_bad_start(self, reason: str) -> None:
        self._num_bad_starts += 1
        if self._num_bad_starts < TRIES:
            return
        self._num_bad_starts = 0
        if self._dying and self._dying.start_error:
            reason = self._dying.start_error
        elif self._dying and getattr(self._dying.process, "needs_script", False):
            reason += f". It imports the script that started the run: write the script's calls under `{GUARD}`"
        self._could_not_start(reason)

    def _is_ready(self, child: Child) -> None:
        child.is_ready, self._num_bad_starts = True, 0

    def _read_process(self, child: Child, *, has_ended: bool) -> None:
        """Reads the bytes that a process sent, including those sent before it ended."""
        has_ended |= not self._links.receive(child)
        try:
            self._heard(child)
        except (ValueError, TypeError, KeyError):  # other code in the process wrote to the connection
            has_ended = True
        if child not in self._children:
            return  # its message ended it
        if has_ended:
            self._handle_end(child)
        else:
            self._links.flush(child)

    def _end(self, child: Child) -> list[J]:
        """Ends a process. Returns its jobs that have not ended, in the order in which they were sent."""
        self._children.remove(child)
        self._starts.withdraw(child)
        self._links.kill(child)
        return [*self._jobs.pop(child).values()]
