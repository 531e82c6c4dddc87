"""Logger on a separate thread: the run queues metrics and never waits for a service."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from interlace.observe.loggers.base import LoggedSample, MetricsLogger

CLOSE_WITHIN_S = 60.0
"""Time for a service to receive the queued metrics when the run ends."""


class ThreadedLogger:
    """Wrapper that makes, calls and closes a logger on one thread.

    If a call fails, the user sees one sentence and the logger gets no further calls; metrics.jsonl contains everything.
    """

    def __init__(self, name: str, make: Callable[[], MetricsLogger], say: Callable[[str], None]) -> None:
        """Waits until the logger is made. Raises the exception of `make`."""
        self._name, self._say = name, say
        self._calls: queue.Queue[Callable[[MetricsLogger], None] | None] = queue.Queue()
        self._made = threading.Event()
        self._error: BaseException | None = None
        self._has_failed = False
        """True if an error ended the run."""
        self._thread = threading.Thread(target=self._run_calls, args=(make,), name=f"logger-{name}", daemon=True)
        self._thread.start()
        self._made.wait()
        if self._error:
            raise self._error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the metrics of a step."""
        self._calls.put(lambda logger: logger.log(step, metrics))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues an evaluation; a logger without log_evaluation gets it as metrics of the step."""
        self._calls.put(lambda logger: getattr(logger, "log_evaluation", logger.log)(step, metrics))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Queues samples, for a logger that has log_samples."""

        def call(logger: MetricsLogger) -> None:
            if log_samples := getattr(logger, "log_samples", None):
                log_samples(step, samples)

        self._calls.put(call)

    def close(self) -> None:
        """Closes the logger after the queue is empty; waits at most CLOSE_WITHIN_S."""
        self._calls.put(None)
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            self._say(f"logger {self._name!r} did not finish in {CLOSE_WITHIN_S:.0f} s: its last metrics may be lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_failed = error is not None
        self.close()

    def _run_calls(self, make: Callable[[], MetricsLogger]) -> None:
        try:
            logger = make()
        except BaseException as error:  # noqa: BLE001 # house: raised on the thread that made the logger
            self._error = error
            return
        finally:
            self._made.set()
        failed = False
        while (call := self._calls.get()) is not None:
            failed = failed or not self._try_call(partial(call, logger))
        self._try_call(getattr(logger, "close_failed", logger.close) if self._has_failed else logger.close)

    def _try_call(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 # house: a service that fails must not end a run
            first = (str(error).strip().splitlines() or [""])[0]
            self._say(
                f"logger {self._name!r} failed and gets no further metrics ({type(error).__name__}: {first}); "
                "metrics.jsonl has all of them"
            )
            return False
        return True
