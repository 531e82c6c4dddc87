"""Table of all metrics of a run: first, last, lowest and highest value."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.observe.run_data import RunData


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSummary:
    """The values of one metric over the steps."""

    name: str
    num_steps: int
    first: float
    last: float
    low: float
    high: float


def metric_summaries(run: RunData) -> Sequence[MetricSummary]:
    """Summarizes each metric of metrics.jsonl and evaluations.jsonl, by name."""
    names = sorted({name for row in (*run.rows, *run.evaluations) for name in row} - {"step"})
    return [
        MetricSummary(
            name=name, num_steps=len(values), first=values[0], last=values[-1], low=min(values), high=max(values)
        )
        for name in names
        if (values := run.values(name))
    ]
