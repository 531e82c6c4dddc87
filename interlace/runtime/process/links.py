"""Connections to the processes that do jobs for this one, watched by one thread."""

import contextlib
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_JOIN_S = 2.0


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
        return "was stopped by a signal" if self.was_stopped else f"ended with exit code {self.find_exit_code()}"

    def find_exit_code(self) -> int | None:
        """Waits briefly for the process to end. Returns its exit code, negative for a signal."""
        if self.process is None:
            return None
        self.process.join(_JOIN_S)
        code: int | None = self.process.exitcode
        return code


class ChildLinks:
    """Sends to processes, receives from them, and waits for their messages and their ends.

    Only wake() may be called from other threads than the one that serves the processes.
    """

    def __init__(self) -> None:
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def wake(self) -> None:
        """Makes the running wait() return, or else the next one. Does nothing after close()."""
        with contextlib.suppress(OSError):  # another thread has closed the connection in the meantime
            self._waker.send(b"\0")

    def wait(self, timeout_s: float | None) -> Mapping[Child, bool]:
        """Waits for an event. timeout_s: None for no limit.

        Returns the processes with an event, and whether each has ended.
        """
        touched: dict[Child, bool] = {}
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._wakes.recv(1 << 16)
            else:
                touched[key.data] = touched.get(key.data, False) or key.fileobj is not key.data.connection
        return touched

    def add(self, child: Child, process: Any, connection: socket.socket) -> None:
        """Sets the started process of a child, and watches it and its connection."""
        child.process, child.connection = process, connection
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, child)
        # Processes that the child started may hold the connection open after the child has ended.
        self._selector.register(process.sentinel, selectors.EVENT_READ, child)

    def receive(self, child: Child) -> bool:
        """Reads all bytes that a process has sent. Returns False once it can send no more."""
        assert child.connection is not None
        try:
            while part := child.connection.recv(1 << 16):
                child.received += part
        except BlockingIOError:  # everything was read
            return True
        except OSError:
            return False
        return False

    def send(self, child: Child, *parts: bytes) -> None:
        """Sends bytes to a process, those without room in the connection later."""
        for part in parts:
            child.unsent += part
        self.flush(child)

    def flush(self, child: Child) -> None:
        """Sends the unsent bytes of a process, as far as the connection has room."""
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

    def kill(self, child: Child) -> None:
        """Ends a process and its connection, if it has started."""
        if child.connection is not None:
            self._forget_handle(child.connection)
        if child.process is not None:
            self._forget_handle(child.process.sentinel)
            child.process.kill()
        if child.connection is not None:
            child.connection.close()
        if child.process is not None:
            child.process.join(_JOIN_S)

    def end_waiting(self) -> None:
        """Frees the selector, at the end of the thread that waits."""
        self._selector.close()

    def close(self) -> None:
        """Frees the rest, after the end of that thread."""
        self._waker.close()
        self._wakes.close()

    def _forget_handle(self, handle: Any) -> None:
        with contextlib.suppress(KeyError):  # it was not registered yet
            self._selector.unregister(handle)
