"""Loggers of metrics: each module of this package is found by its name; a user's logger is `package.module:Name`."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType
from typing import Self, cast

from interlace.core.errors import UserError, first_line
from interlace.core.plugins import builtin_module, load_callable
from interlace.observe.loggers.base import LoggedSample, MetricsLogger, RunInfo, ThreadedLogger
from interlace.observe.loggers.jsonl import Logger as JsonlLogger


class MetricsLoggers:
    """All loggers of a run in one object.

    metrics.jsonl is always written, before `log` returns: reports and resumed runs read it. Every other logger runs on
    a thread, so that a slow server does not delay the run.
    """

    def __init__(self, info: RunInfo, names: Sequence[str], say: Callable[[str], None]) -> None:
        self._loggers: list[ThreadedLogger] = []
        with ExitStack() as opened:  # If a later logger fails, this closes the open ones.
            self._jsonl = opened.enter_context(closing(JsonlLogger(info)))
            for name in dict.fromkeys(names):
                if name != "jsonl":
                    logger = ThreadedLogger(name, partial(_make, name, info), say)
                    self._loggers.append(opened.enter_context(logger))
            self._open = opened.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs all metrics of a step; called once per step."""
        self._jsonl.log(step, metrics)
        for logger in self._loggers:
            logger.log(step, dict(metrics))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs an evaluation outside the steps: before the first or after the last one."""
        for logger in self._loggers:
            logger.log_evaluation(step, dict(metrics))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Logs a few samples of a step, for the loggers that have tables."""
        for logger in self._loggers if samples else ():
            logger.log_samples(step, samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes each logger, also if one of them raises. An error is the failure of the run."""
        self._open.__exit__(kind, error, trace)


def open_loggers(
    info: RunInfo, names: Sequence[str] | None = None, *, say: Callable[[str], None] | None = None
) -> MetricsLoggers:
    """Opens the run's loggers. names: None takes TensorBoard if it is installed. `say` shows a sentence to the user.

    Raises UserError if a name is unknown, a service's package is not installed, or a service does not start.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    return MetricsLoggers(info, names, say or print)


def load_logger(name: str) -> Callable[[RunInfo], MetricsLogger]:
    """Returns the factory of the logger. Raises UserError if it does not exist or its package is not installed."""
    if ":" in name:
        return cast("Callable[[RunInfo], MetricsLogger]", load_callable("logger", name))
    try:
        module = builtin_module("logger", sys.modules[__name__], name)
    except ModuleNotFoundError as error:
        raise UserError(f"logger {name!r} needs the package {error.name!r}: pip install {error.name}.") from error
    return cast("Callable[[RunInfo], MetricsLogger]", module.Logger)


def _make(name: str, info: RunInfo) -> MetricsLogger:
    factory = load_logger(name)
    try:
        logger = factory(info)
    except UserError:
        raise
    except Exception as error:
        if ":" in name:
            raise  # In the user's code the traceback helps.
        raise UserError(f"logger {name!r} does not start: {first_line(error)}") from error
    missing = [method for method in ("log", "close") if not callable(getattr(logger, method, None))]
    if missing:
        raise UserError(f"logger {name!r} has no {' and no '.join(missing)}: it needs log(step, metrics) and close().")
    return logger
