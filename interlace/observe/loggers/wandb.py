"""Weights & Biases: online with an account, or offline with WANDB_MODE=offline."""

from collections.abc import Mapping, Sequence

import wandb

from interlace.observe.loggers.base import LoggedSample, RunInfo

STEP = "step"
"""Metric of the step, the horizontal axis of all others. W&B's own step cannot be: W&B drops each row whose step is not
larger than the last one, as of the steps that a resumed run repeats."""


class Logger:
    """Logger to a run of a W&B project. A resumed run keeps its id; another run of the same name has another id."""

    def __init__(self, info: RunInfo) -> None:
        self._run = wandb.init(
            project=info.project_or("WANDB_PROJECT"),
            name=info.name,
            id=info.run_id or None,
            resume="allow",
            dir=str(info.folder),
            config=dict(info.config),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [[each.prompt, each.response, each.reward, each.num_tokens] for each in samples]
        table = wandb.Table(columns=["prompt", "response", "reward", "num_tokens"], data=rows)
        self._run.log({"samples": table, STEP: step})

    def close(self) -> None:
        self._run.finish()

    def close_failed(self) -> None:
        self._run.finish(exit_code=1)
