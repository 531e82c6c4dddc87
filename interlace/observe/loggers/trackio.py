"""Trackio, Hugging Face's local-first tracker. Not run by our tests."""

from collections.abc import Mapping

import trackio

from interlace.observe.loggers.base import RunInfo


class Logger:
    """A run of the project `interlace`."""

    def __init__(self, info: RunInfo) -> None:
        self._run = trackio.init(project="interlace", name=info.name, resume="allow", config=dict(info.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
