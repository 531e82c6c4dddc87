"""Processes that do jobs for this one, each over a socket: started from a fork server, driven by a thread."""

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from interlace.core.causes import Cause
from interlace.core.errors import RestartBudgetError
from interlace.core.recovery import RestartBudget
from interlace.runtime.process.launch import GUARD, fork_servers

TRIES = 3
"""Number of consecutive failed starts of a process after which the waiting jobs fail."""
FIRST_START_S, START_S = 120.0, 20.0
"""Seconds for the start of a process. The first start takes longer, because the fork server imports modules."""
_JOIN_S = 2.0
LOOK_S = 1.0
"""Seconds between two looks for processes that a signal has stopped."""


Place: TypeAlias = Callable[[str, Callable[..., None], tuple[object, ...]], tuple[Any, socket.socket]]
"""Starts a named process that runs target(connection, *arguments). Returns the process and this end of the connection.
Raises OSError if the start fails."""


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process (SIGSTOP). Always False on systems without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


@dataclass(kw_only=True, slots=True, eq=False)
class Child:
    """A process and the connection to it."""

    process: Any = None
    """None until it has started."""
    connection: socket.socket | None = None
    """None until it has started."""
    start_by_s: float = 0.0
    """Time at which a process that has not started is given up."""
    is_ready: bool = False
    """True once it reported that it can work."""
    received: bytearray = field(default_factory=bytearray)
    """Received bytes that have not been parsed as messages."""
    unsent: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    """True while the unsent bytes wait for room in the connection."""
    has_ended: bool = False
    """True once the owner has ended it."""
    start_error: str = ""
    """Reason why it could not be started."""
    was_stopped: bool = False
    """True if it was killed because a signal had stopped it."""

    @property
    def last_words(self) -> str:
        """Describes the end of the process, for a message."""
        if self.start_error:
            return f"did not start: {self.start_error}"
        return "was stopped by a signal" if self.was_stopped else f"ended with exit code {self.ended_with()}"

    def ended_with(self) -> int | None:
        """Waits briefly for the process to end. Returns its exit code, negative for a signal."""
        if self.process is None:
            return None
        self.process.join(_JOIN_S)
        code: int | None = self.process.exitcode
        return code


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Launch:
    """Result of the start of a process."""

    child: Child
    process: Any = None
    connection: socket.socket | None = None
    error: Exception | None = None


class Children(ABC):
    """Owner of processes. One thread serves them all, so time limits hold even if the caller's event loop is blocked.

    Methods that begin with an underscore run on that thread. Each start of a process uses a separate thread: a fork
    server that does not answer delays neither time limits nor close().
    """

    def __init__(
        self, name: str, preload: tuple[str, ...], place: Place | None = None, budget: RestartBudget | None = None
    ) -> None:
        """name: of the thread and the processes. preload: modules that the fork server imports for all of them.

        place: function that starts a process elsewhere; if None, processes start on this machine. budget: limit of
        restarts; None for no limit.
        """
        self._name, self._place, self._budget = name, place, budget
        self._preload = preload
        self._children: list[Child] = []
        self._launched: deque[_Launch] = deque()
        self._launching = threading.Lock()
        self._dying: Child | None = None
        """Process whose end is currently handled."""
        self._num_bad_starts = 0
        self._next_look_s = 0.0
        self._error: BaseException | None = None
        """Error by which the thread ended."""
        self._closed = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def close(self) -> None:
        """Ends the processes and their jobs."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._waker.close()
        self._wakes.close()

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
    def _died(self, child: Child) -> None:
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

    def _wake(self) -> None:
        """Makes the thread call _serve(); called from other threads."""
        self._waker.send(b"\0")

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
        self._selector.close()

    def _listen(self) -> None:
        touched: dict[Child, bool] = {}
        for key, _ in self._selector.select(self._seconds_to_wait()):
            if key.data is None:
                self._wakes.recv(1 << 16)
            else:
                touched[key.data] = touched.get(key.data, False) or key.fileobj is not key.data.connection
        for child, has_ended in touched.items():
            if child in self._children:
                self._hear(child, has_ended=has_ended)
        while self._launched:
            self._finish_start(self._launched.popleft())
        self._give_up_late_starts()
        if self._place is None:
            self._kill_stopped()

    def _seconds_to_wait(self) -> float | None:
        starts = [max(0.0, child.start_by_s - time.monotonic()) for child in self._children if not child.process]
        limit_s = self._patience_s()
        look_s = [LOOK_S] if self._place is None and self._children else []
        return min([*starts, *look_s, *([] if limit_s is None else [limit_s])], default=None)

    def _kill_stopped(self) -> None:
        """Kills processes that a signal has stopped; the next look finds that they have ended."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        for child in self._children:
            if child.process is not None and is_stopped(child.process.pid):
                child.was_stopped = True
                child.process.kill()

    def _start(self, target: Callable[..., None], *args: object) -> Child:
        """Begins the start of a process that runs target(connection, *args)."""
        within_s = START_S if self._place is None and fork_servers().is_warm else FIRST_START_S
        child = Child(start_by_s=time.monotonic() + within_s)
        self._children.append(child)
        threading.Thread(
            target=self._launch, args=(child, target, args), name=f"start of {self._name}", daemon=True
        ).start()
        return child

    def _launch(self, child: Child, target: Callable[..., None], args: tuple[object, ...]) -> None:
        """Starts a process. Runs on a thread of its start."""
        place = self._place or self._start_here
        try:
            process, connection = place(self._name, target, args)
            launch = _Launch(child=child, process=process, connection=connection)
        except Exception as error:  # noqa: BLE001 - the owner's thread handles it
            launch = _Launch(child=child, error=error)
        with self._launching:
            if not child.has_ended:
                self._launched.append(launch)
                self._wake()
                return
        if launch.process:  # it started too late
            launch.process.kill()
        if launch.connection:
            launch.connection.close()

    def _start_here(
        self, name: str, target: Callable[..., None], args: tuple[object, ...]
    ) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return fork_servers().start(name, target, (theirs, *args), self._preload), ours
            except BaseException:
                ours.close()
                raise

    def _finish_start(self, launch: _Launch) -> None:
        child = launch.child
        if launch.error is not None:
            if not isinstance(launch.error, OSError | EOFError):
                raise launch.error
            self._fail_start(child, str(launch.error) or "the fork server ended")
            return
        assert launch.connection is not None
        child.process, child.connection = launch.process, launch.connection
        child.connection.setblocking(False)
        self._selector.register(child.connection, selectors.EVENT_READ, child)
        # Processes that the child started may hold the connection open after the child has ended.
        self._selector.register(child.process.sentinel, selectors.EVENT_READ, child)

    def _give_up_late_starts(self) -> None:
        late = [child for child in self._children if not child.process and child.start_by_s <= time.monotonic()]
        if late and self._place is None:
            fork_servers().replace()
        for child in late:
            self._fail_start(child, "the fork server did not answer")

    def _fail_start(self, child: Child, reason: str) -> None:
        child.start_error = reason
        self._handle_end(child)

    def _handle_end(self, child: Child) -> None:
        self._dying = child
        self._died(child)
        self._dying = None
        if self._budget and (reason := self._budget.spend(time.monotonic())):
            raise RestartBudgetError(f"{reason} (cause: {Cause.RESOURCE}). The last process {child.last_words}.")

    def _started_badly(self, reason: str) -> None:
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

    def _send(self, child: Child, *parts: bytes) -> None:
        for part in parts:
            child.unsent += part
        self._flush(child)

    def _flush(self, child: Child) -> None:
        assert child.connection is not None
        is_full = False
        try:
            while child.unsent:
                del child.unsent[: child.connection.send(child.unsent)]
        except BlockingIOError:
            is_full = True
        except OSError:  # the process has ended; the next read handles this
            child.unsent.clear()
        if is_full != child.is_full:
            child.is_full = is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
            self._selector.modify(child.connection, events, child)

    def _hear(self, child: Child, *, has_ended: bool) -> None:
        """Reads the bytes that a process sent, including those sent before it ended."""
        assert child.connection is not None
        try:
            while part := child.connection.recv(1 << 16):
                child.received += part
            has_ended = True
        except BlockingIOError:  # everything was read
            pass
        except OSError:
            has_ended = True
        try:
            self._heard(child)
        except (ValueError, TypeError, KeyError):  # other code in the process wrote to the connection
            has_ended = True
        if child not in self._children:
            return  # its message ended it
        if has_ended:
            self._handle_end(child)
        else:
            self._flush(child)

    def _end(self, child: Child) -> None:
        self._children.remove(child)
        with self._launching:
            child.has_ended = True
            waiting = [launch for launch in self._launched if launch.child is child]
        for launch in waiting:  # started, but not yet handled by this thread
            self._launched.remove(launch)
            child.process, child.connection = launch.process, launch.connection
        if child.connection is not None:
            self._forget(child.connection)
        if child.process is not None:
            self._forget(child.process.sentinel)
            child.process.kill()
        if child.connection is not None:
            child.connection.close()
        if child.process is not None:
            child.process.join(_JOIN_S)

    def _forget(self, handle: Any) -> None:
        with contextlib.suppress(KeyError):  # it was not registered yet
            self._selector.unregister(handle)
