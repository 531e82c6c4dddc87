"""The best step of a run by a metric, and the number of measurements since then."""

import math
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from interlace.core.config import Config
from interlace.observe.jsonl import Row, read_whole_rows
from interlace.observe.run_folder import RunFolder

EVALUATION = "eval/"
"""Beginning of the names of metrics that evaluations measure."""
_IS_COST = re.compile(r"loss$|(?<![A-Za-z])(loss|kl|errors?|perplexity|gap|failed)(?![A-Za-z])")
"""Words in the names of metrics of which the smallest value is the best."""


class BestConfig(Config):
    """Choice of the best checkpoint by a metric, and early stopping. Written as the metric's name, or as a mapping."""

    metric: str = Field(min_length=1)
    """Metric to compare: `eval/...`, measured by each evaluation, or a metric of each step, such as `reward/mean`."""
    mode: Literal["max", "min"] | None = None
    """max: the largest value is the best. If None, min for a metric whose name contains the word loss, kl, error,
    perplexity, gap or failed, such as `actor/teacher_kl`, else max. Names of held-out sets and of the parts of a reward
    do not count."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Difference to the best value so far above which a value counts as better."""
    patience: int | None = Field(default=None, ge=1)
    """Measurements without a better value after which the run ends. If None, the run makes all its steps."""

    @property
    def is_evaluated(self) -> bool:
        """Returns whether evaluations measure the metric."""
        return self.metric.startswith(EVALUATION)

    @property
    def sign(self) -> int:
        """Returns 1 if the largest value is the best, else -1."""
        # Users name the set in eval/SET/accuracy_greedy and the part in reward/PART, of which more is better.
        name = self.metric.rpartition("/")[2] if self.is_evaluated else self.metric
        guess = "min" if _IS_COST.search(name) and not name.startswith("reward/") else "max"
        return -1 if (self.mode or guess) == "min" else 1


class BestTracker:
    """Follows the metric of a run. Values before the first step do not count: no checkpoint belongs to them."""

    def __init__(self, config: BestConfig) -> None:
        self.config = config
        self.step: int | None = None
        """The best step; None before the first value."""
        self.value = -math.inf * config.sign
        self.num_since = 0
        """Measurements since the best step."""
        self.measured: dict[int, float] = {}
        """Step -> finite value."""

    def observe(self, step: int, metrics: Mapping[str, object], *, is_extra: bool = False) -> bool:
        """Takes the metrics of a step. Returns True if it is the best step so far.

        is_extra: True for an evaluation that a longer run would not have made. It does not count for `patience`.
        """
        if self.config.metric not in metrics:
            return False
        value, sign = metrics[self.config.metric], self.config.sign
        if isinstance(value, int | float) and math.isfinite(value):  # the logs have null for other numbers
            self.measured[step] = value
            if self.step is None or sign * (value - self.value) > self.config.min_delta:
                self.step, self.value, self.num_since = step, float(value), 0
                return True
        self.num_since += not is_extra
        return False

    @property
    def is_exhausted(self) -> bool:
        """Returns whether the metric has not improved for `patience` measurements."""
        return self.config.patience is not None and self.num_since >= self.config.patience

    def choose_among(self, steps: list[int]) -> None:
        """Chooses among the steps that have a checkpoint, if the checkpoint of the best step is lost."""
        if self.step is None or self.step in steps:
            return
        left = {step: self.measured[step] for step in steps if step in self.measured}
        self.step = max(left, key=lambda step: self.config.sign * left[step], default=None)
        self.value = left[self.step] if self.step is not None else -math.inf * self.config.sign


def read_best(config: BestConfig, folder: RunFolder, steps: list[int]) -> BestTracker:
    """Follows the metric through the logs of a run. steps: the steps that have a checkpoint."""
    rows: dict[int, tuple[Row, bool]] = {}
    for path in (folder.evaluations, folder.metrics):
        for row in read_whole_rows(path) if path.exists() else ():
            step = row.get("step")
            if isinstance(step, int) and step > 0 and config.metric in row:
                # The evaluation at the end of a command is not among the metrics of its step, unless it was due.
                rows[step] = row, path == folder.evaluations
    tracker = BestTracker(config)
    for step, (row, is_extra) in sorted(rows.items()):
        tracker.observe(step, row, is_extra=is_extra)
    tracker.choose_among(steps)
    return tracker
