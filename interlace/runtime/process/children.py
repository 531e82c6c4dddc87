"""Processes that do jobs for this one, each over a socket: started from a clean server, driven by a thread."""

import multiprocessing
import selectors
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from typing import Any, TypeAlias

TRIES = 3
"""Starts of a process in a row that come to nothing, before the jobs that wait for one fail."""
_JOIN_S = 2.0


Place: TypeAlias = Callable[[str, Callable[..., None], tuple[object, ...]], tuple[Any, socket.socket]]
"""Starts a named process that runs target(connection, *arguments). Returns the process and this end of the connection.
Raises OSError where that fails."""


@dataclass(kw_only=True, slots=True, eq=False)
class Child:
    """A process and the connection to it."""

    process: Any
    connection: socket.socket
    is_ready: bool = False
    """Flag: it said that it can work."""
    received: bytearray = field(default_factory=bytearray)
    """Bytes that it sent, not taken in so far."""
    unsent: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    """Flag: what is unsent waits for room in the connection."""

    def ended_with(self) -> int | None:
        """Waits a little for the process to end; returns its exit code, negative for a signal."""
        self.process.join(_JOIN_S)
        code: int | None = self.process.exitcode
        return code


class Children(ABC):
    """Owner of processes. One thread hears them all, so that time limits hold whatever the caller's event loop does.

    Methods that begin with an underscore run on that thread.
    """

    def __init__(self, name: str, preload: tuple[str, ...], place: Place | None = None) -> None:
        """name: of the thread, and of the processes. preload: modules that all of them share the import of.

        place: starts a process elsewhere; None starts them on this machine.
        """
        self._name, self._place = name, place or self._here
        # Forked from a clean server: a process starts in milliseconds, also after a time limit ended the last one, and
        # never inherits this process's torch threads or memory.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._children: list[Child] = []
        self._num_bad_starts = 0
        self._closed = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def close(self) -> None:
        """Ends the processes, with what they are doing."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._waker.close()
        self._wakes.close()

    @abstractmethod
    def _patience_s(self) -> float | None:
        """Returns the seconds until the next time limit; None where there is none."""

    @abstractmethod
    def _serve(self) -> None:
        """Takes new jobs in, keeps time limits and hands jobs out; called after each event."""

    @abstractmethod
    def _heard(self, child: Child) -> None:
        """Takes in `child.received`. Raises ValueError, TypeError or KeyError for what is no message."""

    @abstractmethod
    def _died(self, child: Child) -> None:
        """Deals with the jobs of a process that ended; `_end` is the last thing it calls."""

    @abstractmethod
    def _could_not_start(self, reason: str) -> None:
        """Fails what waits: TRIES starts in a row came to nothing."""

    @abstractmethod
    def _fail_all(self, error: BaseException | None) -> None:
        """Fails every job, at the end. error: a fault of this class; None where it was closed."""

    def _wake(self) -> None:
        """Has the thread serve; called from other threads."""
        self._waker.send(b"\0")

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while not self._closed:
                self._listen()
                self._serve()
        except Exception as bug:  # noqa: BLE001 - it is raised where the results are awaited
            error, self._closed = bug, True
        self._fail_all(error)
        for child in [*self._children]:
            self._end(child)
        self._selector.close()

    def _listen(self) -> None:
        touched: dict[Child, bool] = {}
        for key, _ in self._selector.select(self._patience_s()):
            if key.data is None:
                self._wakes.recv(1 << 16)
            else:
                touched[key.data] = touched.get(key.data, False) or key.fileobj is not key.data.connection
        for child, has_ended in touched.items():
            if child in self._children:
                self._hear(child, has_ended=has_ended)

    def _start(self, target: Callable[..., None], *args: object) -> Child | None:
        """Starts a process that runs target(connection, *args); returns None where that failed."""
        try:
            process, ours = self._place(self._name, target, args)
        except (OSError, EOFError) as error:
            self._started_badly(str(error))
            return None
        ours.setblocking(False)
        child = Child(process=process, connection=ours)
        self._children.append(child)
        self._selector.register(ours, selectors.EVENT_READ, child)
        # A child of the process's own may hold the connection open longer than the process lives.
        self._selector.register(process.sentinel, selectors.EVENT_READ, child)
        return child

    def _here(self, name: str, target: Callable[..., None], args: tuple[object, ...]) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            _start_server()
            process = self._context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
            process.start()
        except (OSError, EOFError):
            ours.close()
            raise
        finally:
            theirs.close()
        return process, ours

    def _started_badly(self, reason: str) -> None:
        self._num_bad_starts += 1
        if self._num_bad_starts >= TRIES:
            self._num_bad_starts = 0
            self._could_not_start(reason)

    def _is_ready(self, child: Child) -> None:
        child.is_ready, self._num_bad_starts = True, 0

    def _send(self, child: Child, *parts: bytes) -> None:
        for part in parts:
            child.unsent += part
        self._flush(child)

    def _flush(self, child: Child) -> None:
        is_full = False
        try:
            while child.unsent:
                del child.unsent[: child.connection.send(child.unsent)]
        except BlockingIOError:
            is_full = True
        except OSError:  # it is gone, which reading will tell
            child.unsent.clear()
        if is_full != child.is_full:
            child.is_full = is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
            self._selector.modify(child.connection, events, child)

    def _hear(self, child: Child, *, has_ended: bool) -> None:
        """Takes in what a process sent, before it ended too."""
        try:
            while part := child.connection.recv(1 << 16):
                child.received += part
            has_ended = True
        except BlockingIOError:  # that was all so far
            pass
        except OSError:
            has_ended = True
        try:
            self._heard(child)
        except (ValueError, TypeError, KeyError):  # other code of the process's wrote on the connection
            has_ended = True
        if child not in self._children:
            return  # what it said ended it
        if has_ended:
            self._died(child)
        else:
            self._flush(child)

    def _end(self, child: Child) -> None:
        self._children.remove(child)
        self._selector.unregister(child.connection)
        self._selector.unregister(child.process.sentinel)
        child.process.kill()
        child.connection.close()
        child.process.join(_JOIN_S)


def _start_server() -> None:
    """Starts the server deaf to SIGTERM, which a whole run may get: without the server no process can start."""
    resource_tracker.ensure_running()  # where the server started it, it would undo the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
