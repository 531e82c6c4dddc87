"""A thread that runs functions one at a time."""

import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """Daemon thread. Unlike an executor's thread, it never prevents the process from ending."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Runs a function after all functions submitted earlier."""
        outcome: Future[T] = Future()
        self._jobs.put((function, outcome))
        return outcome

    def end(self) -> None:
        """Ends the thread after all submitted functions."""
        self._jobs.put(None)

    def interrupt(self) -> None:
        """Interrupts the thread, if possible, at its next line of Python."""
        self.end()
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, outcome = job
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it is raised again when the result is awaited
                    outcome.set_exception(error)
            del job, function, outcome  # results can be large: do not keep them until the next job
