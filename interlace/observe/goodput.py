"""Goodput ledger: accounts each device-second to exactly one bin. docs/bubbles.md defines how the bins are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interlace.core.types import Metrics

PREFIX = "goodput/"
USEFUL = ("train", "generate", "simulate", "score", "inference")
GOVERNED_BY: Mapping[str, str] = {
    "decode_underfilled": "dispatch (which engine gets what), or fewer rollout devices (placement)",
    "re_prefill": "on_update (keep computes nothing twice), a larger rollout_budget, or kv_on_switch: offload",
    "discarded": "tail (surplus) or on_straggler (stale); for filtered groups, the algorithm's filter",
    "weight_sync": "sync_every (fewer publications), or publish: background",
    "switch": "placement (roles that share devices), or min_hold",
    "lock_wait": "placement (who shares a device with whom), or granularity",
    "tool_wait": "a higher max_staleness or pipeline_depth (more episodes at once), episode.workers, or faster tools",
    "tail_bubble": "tail (what is done about the long tail), or a higher max_staleness",
    "pipeline_bubble": "placement (the share of devices of each role), or a higher max_staleness",
    "idle": "no field: it is logging, evaluation, checkpoints and the controller's own time",
}
"""Waste -> fields of the schedule that govern it. Startup is absent: it is paid once, regardless of the run's length.
"""
BINS = (
    "train",
    "generate",
    "decode_underfilled",
    "simulate",
    "score",
    "inference",
    "re_prefill",
    "discarded",
    "weight_sync",
    "switch",
    "lock_wait",
    "tool_wait",
    "tail_bubble",
    "pipeline_bubble",
    "startup",
    "idle",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waste:
    """A bin in which devices train nothing."""

    name: str
    fraction: float
    """Share of all device-seconds."""
    governed_by: str

    @property
    def sentence(self) -> str:
        share = f"{self.fraction:.1%} of the steps' device time"
        return f"Largest waste: {self.name}, {share}; governed by {self.governed_by}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Device-seconds by bin."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Device-seconds in all bins."""
        return sum(self.seconds.values())

    def fraction(self, name: str) -> float:
        """Returns a bin's share, between 0 and 1; 0 if the ledger is empty."""
        return self.seconds.get(name, 0.0) / self.total_s if self.total_s > 0 else 0.0

    def plus(self, other: "Ledger") -> "Ledger":
        return Ledger(seconds={name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in BINS})

    def largest_waste(self) -> Waste | None:
        """Returns the largest bin that is neither useful work nor startup; None if all of them are empty."""
        worst = max(GOVERNED_BY, key=self.fraction)
        if self.fraction(worst) == 0:
            return None
        return Waste(name=worst, fraction=self.fraction(worst), governed_by=GOVERNED_BY[worst])

    def metrics(self) -> Metrics:
        """Returns `goodput/BIN` for every bin (their sum is 1) and the share of the largest waste."""
        waste = self.largest_waste()
        shares = {f"{PREFIX}{name}": self.fraction(name) for name in BINS}
        return {**shares, f"{PREFIX}largest_waste": waste.fraction if waste else 0.0}


def ledger_of(rows: Sequence[Mapping[str, object]]) -> Ledger:
    """Sums the ledgers of the steps in metrics.jsonl, each weighted by its step's time."""
    seconds = dict.fromkeys(BINS, 0.0)
    for row in rows:
        step_s = row.get("timing_s/step")
        for name in BINS:
            share = row.get(f"{PREFIX}{name}")
            if isinstance(share, int | float) and isinstance(step_s, int | float):
                seconds[name] += share * step_s
    return Ledger(seconds=seconds)
