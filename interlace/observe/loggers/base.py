"""Interface of a metrics logger."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from interlace.core.types import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts of a run that a logger is made from."""

    name: str
    folder: Path
    config: Mapping[str, JSON]
    """Resolved."""
    resumed_at: int | None = None
    """The step of the checkpoint a resumed run goes on from: what was logged of later steps is void."""


class MetricsLogger(Protocol):
    """A logger is made as `Logger(info)` and used from one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; called once a step."""
        ...

    def close(self) -> None: ...
