"""Counters of an engine between two reads of its metrics."""

import time

from interlace.core.types import Metrics
from interlace.engines.rollout.scheduler import Scheduler


class Counters:
    """Sums since the last read."""

    def __init__(self) -> None:
        self.schedule_s = 0.0
        self._prepared = 0
        self._reset_counts(0.0, 0, 0)

    def count(self, *, tokens: int, sampled: int, forward_s: float, sample_s: float, steps: int = 1) -> None:
        """Counts run and sampled tokens, and the time spent."""
        self._steps += steps
        self._sampled += sampled
        self._prefilled += tokens - sampled
        self._forward_s += forward_s
        self._sample_s += sample_s

    def count_drafts(self, proposed: int, accepted: int) -> None:
        """Counts the drafts of one row."""
        self._drafts += proposed
        self._accepted += accepted

    def read(self, scheduler: Scheduler, reused: int, attention_s: float) -> Metrics:
        """Returns rates and sums since the last call. attention_s, reused: totals since the engine's start."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        metrics = {
            "num_running": float(len(scheduler.running)),
            "num_waiting": float(len(scheduler.waiting)),
            "num_steps": float(self._steps),
            "decode_tokens": float(self._sampled),
            "prefill_tokens": float(self._prefilled),
            "decode_tokens_per_s": self._sampled / elapsed,
            "prefill_tokens_per_s": self._prefilled / elapsed,
            "num_preemptions": float(scheduler.num_preemptions - self._preemptions),
            "planned_ahead": float(scheduler.num_prepared - self._prepared),
            "reused_tokens": float(reused - self._reused),
            "draft_tokens": float(self._drafts),
            "draft_acceptance": self._accepted / max(self._drafts, 1),
            "schedule_s": self.schedule_s,
            "forward_s": self._forward_s,
            "attention_s": attention_s - self._attention_s,
            "sample_s": self._sample_s,
        }
        self._prepared = scheduler.num_prepared
        self._reset_counts(attention_s, scheduler.num_preemptions, reused)
        return metrics

    def _reset_counts(self, attention_s: float, preemptions: int, reused: int) -> None:
        self._since = time.perf_counter()
        self._steps = self._sampled = self._prefilled = 0
        self.schedule_s = self._forward_s = self._sample_s = 0.0
        self._attention_s, self._preemptions, self._reused = attention_s, preemptions, reused
        self._drafts = self._accepted = 0
