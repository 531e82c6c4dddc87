"""The metric that a run displays first. Algorithms import it, so it loads no terminal library."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """Metric that shows first whether a step improved the policy."""

    metric: str
    """Name in metrics.jsonl."""
    name: str
    """Name for display."""
    digits: int = 2
    """Displayed decimals."""


REWARD = Headline(metric="reward/mean", name="reward")
