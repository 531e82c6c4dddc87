"""Destinations of metrics: each module here is a logger found by its name; a user's own is `package.module:Name`."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self, cast

from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_callable
from interlace.observe.loggers.base import MetricsLogger, RunInfo


class MetricsLoggers:
    """All loggers of a run as one. `jsonl` is always among them: reports and resuming read it."""

    def __init__(self, info: RunInfo, names: Sequence[str]) -> None:
        self._loggers: list[MetricsLogger] = []
        self._open = ExitStack()
        with self._open:  # closes those already open where a later one fails
            for name in dict.fromkeys(["jsonl", *names]):
                logger = _make(name, info)
                self._open.callback(logger.close)
                self._loggers.append(logger)
            self._open = self._open.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes everything known of a step, called once a step."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        """Closes each, also where one of them raises."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_loggers(info: RunInfo, names: Sequence[str] | None = None) -> MetricsLoggers:
    """Opens the run's loggers. names: None takes TensorBoard where it is installed.

    Raises UserError for an unknown name, or a service whose package is not installed.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    return MetricsLoggers(info, names)


def load_logger(name: str) -> Callable[[RunInfo], MetricsLogger]:
    """Returns the factory of the logger. Raises UserError where there is none, or its package is not installed."""
    if ":" in name:
        return cast("Callable[[RunInfo], MetricsLogger]", load_callable("logger", name))
    try:
        module = builtin_module("logger", sys.modules[__name__], name)
    except ModuleNotFoundError as error:
        raise UserError(f"logger {name!r} needs the package {error.name!r}: pip install {error.name}.") from error
    return cast("Callable[[RunInfo], MetricsLogger]", module.Logger)


def _make(name: str, info: RunInfo) -> MetricsLogger:
    logger = load_logger(name)(info)
    missing = [method for method in ("log", "close") if not callable(getattr(logger, method, None))]
    if missing:
        raise UserError(f"logger {name!r} has no {' and no '.join(missing)}: it needs log(step, metrics) and close().")
    return logger
