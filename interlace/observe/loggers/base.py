"""Interface of a metrics logger, and a logger on a thread, so that the run never waits for a service."""

import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from interlace.core.types import JSON

DEFAULT_PROJECT = "interlace"


def make_plain_name(name: str, also: str = "") -> str:
    """Returns the name of a metric for a service that refuses other characters, such as the `@` of eval/pass@8.

    Letters and digits of ASCII, `_`, `-`, `.`, `/` and the characters of `also` stay; others become `_`.
    """
    return re.sub(rf"[^A-Za-z0-9_./{re.escape(also)}-]", "_", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts about a run from which a logger is made."""

    name: str
    """Name of the run at the service."""
    folder: Path
    config: Mapping[str, JSON]
    """Resolved settings, with masked secrets."""
    run_id: str = ""
    """Random id that stays the same when the run is resumed. Two runs of one name have two ids."""
    project: str | None = None
    resumed_at: int | None = None
    """Step of the checkpoint from which the run resumes, 0 without one; metrics of later steps are void. None in the
    first process of the run."""

    def project_or(self, variable: str) -> str:
        """Returns the recipe's project, else the environment variable's, else the default project."""
        return self.project or os.environ.get(variable) or DEFAULT_PROJECT


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSample:
    """One sample for a table."""

    prompt: str
    response: str
    reward: float | None
    num_tokens: int


class MetricsLogger(Protocol):
    """Receiver of a run's metrics, made as `Logger(info)`. One thread, which does not run the event loop, makes, calls
    and closes it.

    Three further methods are optional. `log_evaluation(step, metrics)` receives the evaluations before the first and
    after the last step; without it, `log` receives them. `log_samples(step, samples)` receives a few samples after each
    evaluation. `close_failed()` is called instead of `close()` if an error ended the run.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step; called once per step."""

    def close(self) -> None: ...


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
