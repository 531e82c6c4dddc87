"""Interface of a metrics logger."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from interlace.core.types import JSON

DEFAULT_PROJECT = "interlace"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts of a run that a logger is made from."""

    name: str
    """Name of the run at the service."""
    folder: Path
    config: Mapping[str, JSON]
    """Resolved settings, secrets masked."""
    run_id: str = ""
    """Random id that stays the same when the run is resumed. Two runs of one name have two ids."""
    project: str | None = None
    """Project of the recipe (`logging.project`)."""
    resumed_at: int | None = None
    """Step of the checkpoint from which the run resumes; metrics of later steps are void."""

    def project_or(self, variable: str) -> str:
        """Returns the recipe's project, else that environment variable, else the default project."""
        return self.project or os.environ.get(variable) or DEFAULT_PROJECT


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSample:
    """One sample for a table."""

    prompt: str
    response: str
    reward: float | None
    num_tokens: int


class MetricsLogger(Protocol):
    """A logger is made as `Logger(info)`. It is made, used and closed on one thread, which is not the event loop's.

    Two further methods are optional. `log_evaluation(step, metrics)` receives the evaluations before the first and
    after the last step; without it they go to `log`. `log_samples(step, samples)` receives a few samples after each
    evaluation.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; called once a step."""
        ...

    def close(self) -> None: ...


class EvaluationLogger(Protocol):
    """A logger that treats evaluations before and after training differently from steps."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...


class SampleLogger(Protocol):
    """A logger that shows samples as a table."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None: ...
