"""Interface of a metrics logger."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
    """Project of the recipe (`logging.project`)."""
    resumed_at: int | None = None
    """Step of the checkpoint from which the run resumes; metrics of later steps are void."""

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
