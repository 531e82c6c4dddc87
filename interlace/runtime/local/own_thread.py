"""A thread that runs functions one at a time."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """Unlike an executor's it does not keep the process from ending, whatever it does then."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Runs a function after those submitted before."""
        outcome: Future[T] = Future()
        self._jobs.put((function, outcome))
        return outcome

    def end(self) -> None:
        """Ends the thread after what was submitted."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, outcome = job
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
                    outcome.set_exception(error)
            del job, function, outcome  # results can be large: not kept until the next
