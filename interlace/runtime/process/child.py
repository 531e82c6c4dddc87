"""Code inside a process that does jobs for a run: start-up, reading of messages, and its event loop."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.core.processes import continue_after_parent
from interlace.core.sockets import receive_exactly
from interlace.runtime.process.launch import leave_fork_server

HEAD = struct.Struct("<IQ")
"""Header of a pickle: the number of the job and the pickle's size in bytes."""
_BEAT_S = 0.05
"""Seconds between two heartbeats of an event loop, and between two checks of them."""


def process_name(name: str) -> str:
    """Returns the kernel's name of a process of a run, by its name in multiprocessing."""
    return f"il-{name.rpartition(' ')[2]}"[:15]


def set_process_name(name: str) -> None:
    """Sets the kernel's name of this process, on Linux."""
    with contextlib.suppress(OSError):  # other systems do not have the file
        Path("/proc/self/comm").write_text(process_name(name), encoding="ascii")


def set_thread_name(role: str) -> None:
    """Sets the kernel's name of this thread, on Linux. It marks a process whose own name a library sets."""
    with contextlib.suppress(OSError):  # other systems do not have the file
        Path("/proc/thread-self/comm").write_text(process_name(role), encoding="ascii")


def notice_end_of_run() -> None:
    """Makes this process notice the end of its run also if a signal has stopped it."""
    if multiprocessing.parent_process() is not None:  # Ray kills the processes that it started
        leave_fork_server()  # a server that waited for the end of this process would not end either
        continue_after_parent()


def become_child() -> None:
    """Makes this process ignore Ctrl-C, end at SIGTERM, end with the run, and carry its role in the kernel's name."""
    notice_end_of_run()
    set_process_name(multiprocessing.current_process().name)
    # SIGTERM is harmless: interrupted jobs are done again in another process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def frame_message(number: int, message: object) -> bytes:
    """Pickles a message and prepends its header."""
    body = pickle.dumps(message, protocol=5)
    return HEAD.pack(number, len(body)) + body


def receive_frame(connection: socket.socket) -> tuple[int, bytes]:
    """Waits for a framed message. Returns its number and its pickle. Raises EOFError if the run hung up."""
    number, size = HEAD.unpack(receive_exactly(connection, HEAD.size))
    return number, receive_exactly(connection, size)


def take_frames(received: bytearray) -> list[tuple[int, Any]]:
    """Removes the complete framed messages from the received bytes, and returns them."""
    found = []
    while len(received) >= HEAD.size:
        number, size = HEAD.unpack_from(received)
        if len(received) < HEAD.size + size:
            break
        found.append((number, pickle.loads(memoryview(received)[HEAD.size : HEAD.size + size].tobytes())))
        del received[: HEAD.size + size]
    return found


def innermost_line(thread: int) -> str:
    """Returns the line that a running thread executes, as `file.py:12 in function`."""
    innermost = traceback.extract_stack(sys._current_frames()[thread])[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


class LoopServer(ABC):
    """Server of jobs on one event loop. One thread receives messages, another detects jobs that block the loop."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        """patience_s: seconds for which a job may block the loop."""
        self._connection, self._patience_s = connection, patience_s
        self._loop = asyncio.new_event_loop()
        self._beat_s = time.monotonic()
        self._thread = threading.get_ident()

    def run(self) -> None:
        for work in (self._take, self._watch):
            threading.Thread(target=work, daemon=True).start()
        self._loop.call_soon(self._beat)
        self._loop.run_forever()

    @abstractmethod
    def _heard(self, number: int, message: Any) -> None:
        """Handles one message, on the loop."""

    @abstractmethod
    def _refuse(self, number: int, error: Exception) -> None:
        """Fails the job of a message that cannot be unpickled, on the loop."""

    @abstractmethod
    def _report_blocked_loop(self, task: asyncio.Task[Any] | None, line: str) -> None:
        """Reports, on a separate thread, that the loop is blocked. task: the running task. line: its current line."""

    def _take(self) -> None:
        try:
            while True:
                number, body = receive_frame(self._connection)
                handle: Callable[[int, Any], None] = self._heard
                try:
                    content = pickle.loads(body)
                except Exception as error:  # noqa: BLE001 - it is the job's failure
                    handle, content = self._refuse, error
                self._loop.call_soon_threadsafe(handle, number, content)
        except (EOFError, OSError):  # the run hung up
            os._exit(0)
        except BaseException:  # noqa: BLE001 - this process would stay otherwise, and its jobs would get no answer
            traceback.print_exc()
            os._exit(1)

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        while time.monotonic() - self._beat_s < self._patience_s + _BEAT_S:
            time.sleep(_BEAT_S)
        self._report_blocked_loop(asyncio.current_task(self._loop), innermost_line(self._thread))


def _end_with_the_run() -> None:
    """Ends this process when the run ends. The run enforces time limits; after a kill, looping code would never end."""
    run = multiprocessing.parent_process()
    if run is not None:
        run.join()
        os._exit(1)
