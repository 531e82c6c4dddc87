"""Trackio, Hugging Face's local-first tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import trackio

from interlace.observe.loggers.base import LoggedSample, RunInfo

ID_LETTERS = 8
"""Letters of the run's id in its name: Trackio identifies a run by its name alone."""


class Logger:
    """Logger to a run of a Trackio project.

    A resumed run continues the same Trackio run. Steps that it repeats have two values there: Trackio (0.43) deletes
    whole runs, but no steps of a run.
    """

    def __init__(self, info: RunInfo) -> None:
        self._run = trackio.init(
            project=info.project_or("TRACKIO_PROJECT"),
            name=f"{info.name}-{info.run_id[:ID_LETTERS]}".rstrip("-"),
            resume="allow",
            config=dict(info.config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        import pandas as pd

        frame = pd.DataFrame([asdict(each) for each in samples])
        self._run.log({"samples": trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()
