"""Where metrics go: each module here is a logger found by its name; a user's own is `package.module:Name`."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, cast

from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_callable
from interlace.observe.loggers.base import MetricsLogger, RunInfo


class MetricsLoggers:
    """All loggers of a run as one. `jsonl` is always among them: reports and resuming read it."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a step, with everything known of it."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_loggers(info: RunInfo, names: Sequence[str] | None = None) -> MetricsLoggers:
    """The run's loggers. names: None takes TensorBoard where it is installed.

    Raises UserError for an unknown name, or a service whose package is not installed.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    return MetricsLoggers([_open(name, info) for name in dict.fromkeys(["jsonl", *names])])


def _open(name: str, info: RunInfo) -> MetricsLogger:
    if ":" in name:
        return cast(MetricsLogger, load_callable("logger", name)(info))
    module = builtin_module("logger", sys.modules[__name__], name)
    make = cast("Callable[[RunInfo], MetricsLogger]", module.Logger)
    try:
        return make(info)
    except ModuleNotFoundError as error:
        raise UserError(f"logger {name!r} needs the package {error.name!r}: pip install {error.name}.") from error
