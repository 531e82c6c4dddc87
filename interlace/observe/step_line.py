"""Summary of one step for display, from its metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TIMING = "timing_s/"
_NAN = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """Metric that shows first whether a step improved the policy."""

    metric: str
    """Name in metrics.jsonl."""
    name: str
    """Name for display."""
    digits: int = 2
    """Displayed decimals."""


PACE_STEPS = 8
"""Last steps whose mean time gives the time left."""


def estimate_time_left(step_s: Sequence[float], num_left: int) -> float:
    """Returns the seconds of the remaining steps, at the mean pace of the last PACE_STEPS steps.

    step_s: seconds of the steps so far, at least one.
    """
    last = step_s[-PACE_STEPS:]
    return max(0, num_left) * sum(last) / len(last)


REWARD = Headline(metric="reward/mean", name="reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """The displayed part of a step's metrics; NaN for a missing metric."""

    step: int
    headline: Headline
    value: float
    """Value of the headline."""
    response_length: float
    """Mean response length, in tokens."""
    staleness: float
    """Mean staleness, in versions."""
    tokens_per_s: float
    step_s: float
    loss: float
    shares: tuple[tuple[str, float], ...]
    """(stage, its part of the sum of all stages' times); overlapping stages count fully."""

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> "StepLine":
        times = {name.removeprefix(_TIMING): time for name, time in metrics.items() if name.startswith(_TIMING)}
        times.pop("step", None)
        total = sum(times.values())
        return cls(
            step=step,
            headline=headline,
            value=metrics.get(headline.metric, _NAN),
            response_length=metrics.get("response_length/mean", _NAN),
            staleness=metrics.get("sched/staleness_mean", _NAN),
            tokens_per_s=metrics.get("perf/throughput", _NAN),
            step_s=metrics.get("timing_s/step", _NAN),
            loss=metrics.get("actor/loss", _NAN),
            shares=tuple((name, time / total) for name, time in times.items() if time > 0) if total > 0 else (),
        )

    @property
    def has_rows(self) -> bool:
        """Returns whether the step trained on given rows, which have a loss and no headline."""
        return math.isnan(self.value) and not math.isnan(self.loss)

    def cells(self) -> tuple[str, str, str, str, str]:
        """Formats headline, response length, staleness, tokens/s and seconds."""
        return (
            number(self.value, self.headline.digits),
            number(self.response_length, 1),
            number(self.staleness, 1),
            short(self.tokens_per_s),
            number(self.step_s, 2),
        )

    def shares_text(self) -> str:
        """Formats the shares, such as `rollout 62%, train 30%`."""
        return ", ".join(f"{name} {share:.0%}" for name, share in self.shares)


def number(value: float, digits: int) -> str:
    """Formats a number with a fixed number of decimals; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def short(value: float) -> str:
    """Formats a count in few characters: 950, 3.2k, 14k, 1.3M."""
    if math.isnan(value):
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats a duration, such as 45 s, 3 min or 2.5 h; a dash for NaN."""
    if math.isnan(seconds):
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def brief(text: str) -> str:
    """Returns the first line of any text for a sentence: printable, at most 200 letters, without a full stop."""
    start = text.partition("\n")[0][:200]
    return printable(start.removesuffix(".")) if start == text else f"{printable(start)} ..."


def printable(text: str, *, keep: str = "") -> str:
    """Escapes control characters, which a terminal would execute. keep: characters that stay."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
