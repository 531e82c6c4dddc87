"""Processes that do jobs for this one, each over a socket: started from a fork server, driven by a thread."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from interlace.core.causes import Cause
from interlace.core.errors import RestartBudgetError
from interlace.core.recovery import RestartBudget
from interlace.runtime.process.launch import GUARD
from interlace.runtime.process.links import Child, ChildLinks
from interlace.runtime.process.starts import LOOK_S, Place, ProcessLaunch, ProcessStarts, StoppedWatch

TRIES = 3
"""Number of consecutive failed starts of a process after which the waiting jobs fail."""


class Children(ABC):
    """Owner of processes. One thread serves them all, so time limits hold even if the caller's event loop is blocked.

    Methods that begin with an underscore run on that thread.
    """

    def __init__(
        self, name: str, preload: tuple[str, ...], place: Place | None = None, budget: RestartBudget | None = None
    ) -> None:
        """name: of the thread and the processes. preload: modules that the fork server imports for all of them.

        place: function that starts a process elsewhere; if None, processes start on this machine. budget: limit of
        restarts; None for no limit.
        """
        self._budget = budget
        self._children: list[Child] = []
        self._links = ChildLinks()
        self._starts = ProcessStarts(name, preload, place, self._links.wake)
        self._stopped_watch = StoppedWatch()
        self._dying: Child | None = None
        """Process whose end is currently handled."""
        self._num_bad_starts = 0
        self._error: BaseException | None = None
        """Error by which the thread ended."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def close(self) -> None:
        """Ends the processes and their jobs."""
        self._closed = True
        self._links.wake()
        self._thread.join()
        self._links.close()

    @abstractmethod
    def _patience_s(self) -> float | None:
        """Returns the seconds until the next time limit; None if no limit runs."""

    @abstractmethod
    def _serve(self) -> None:
        """Accepts new jobs, enforces time limits and assigns jobs; called after each event."""

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

    def _refuse_after_error(self) -> None:
        """Raises the error by which the thread ended, if one did. Called after a job was handed over."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while not self._closed:
                self._listen()
                self._serve()
        except Exception as bug:  # noqa: BLE001 - it is raised to the callers that await results
            error, self._closed = bug, True
        self._error = error  # first: a job that comes later is refused by _refuse_after_error()
        self._fail_all(error)
        for child in [*self._children]:
            self._end(child)
        self._links.end_waiting()

    def _listen(self) -> None:
        for child, has_ended in self._links.wait(self._seconds_to_wait()).items():
            if child in self._children:
                self._hear(child, has_ended=has_ended)
        while launch := self._starts.take():
            self._finish_start(launch)
        for child in self._starts.find_late(self._children):
            self._fail_start(child, "the fork server did not answer")
        if self._starts.are_local:
            self._stopped_watch.kill_stopped(self._children)

    def _seconds_to_wait(self) -> float | None:
        starts = [max(0.0, child.start_by_s - time.monotonic()) for child in self._children if not child.process]
        limit_s = self._patience_s()
        look_s = [LOOK_S] if self._starts.are_local and self._children else []
        return min([*starts, *look_s, *([] if limit_s is None else [limit_s])], default=None)

    def _start(self, target: Callable[..., None], *args: object) -> Child:
        """Begins the start of a process that runs target(connection, *args)."""
        child = self._starts.begin(target, args)
        self._children.append(child)
        return child

    def _finish_start(self, launch: ProcessLaunch) -> None:
        if launch.error is not None:
            if not isinstance(launch.error, OSError | EOFError):
                raise launch.error
            self._fail_start(launch.child, str(launch.error) or "the fork server ended")
            return
        assert launch.connection is not None
        self._links.add(launch.child, launch.process, launch.connection)

    def _fail_start(self, child: Child, reason: str) -> None:
        child.start_error = reason
        self._handle_end(child)

    def _handle_end(self, child: Child) -> None:
        self._dying = child
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

    def _hear(self, child: Child, *, has_ended: bool) -> None:
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

    def _end(self, child: Child) -> None:
        self._children.remove(child)
        self._starts.withdraw(child)
        self._links.kill(child)
