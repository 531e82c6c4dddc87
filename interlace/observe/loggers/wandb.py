"""Weights & Biases. Needs an account; not run by our tests."""

from collections.abc import Mapping

import wandb

from interlace.observe.loggers.base import RunInfo


class Logger:
    """A run of the project `interlace`; resumed under the same id."""

    def __init__(self, info: RunInfo) -> None:
        self._run = wandb.init(
            project="interlace",
            name=info.name,
            id=info.name,
            resume="allow",
            dir=str(info.folder),
            config=dict(info.config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
