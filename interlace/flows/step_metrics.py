"""Metrics of one step, under the names that are common in the field."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum

import numpy as np

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.recovery import Cause
from interlace.core.types import Metrics, Sample, SampleKey, TerminalEvent
from interlace.flows.steps import Ended
from interlace.observe.goodput import Ledger
from interlace.rewards.base import ACCURACY
from interlace.runtime.cluster import Cluster
from interlace.runtime.goodput import LedgerBuilder
from interlace.runtime.timeline import EngineCall, Records, Span, StepRecord, busy_seconds, by_device
from interlace.stages.batches import Batch

SCORED = (TerminalEvent.TRAINED, TerminalEvent.FILTERED)
PHASES = ("rollout", "reward", "reference", "values", "train", "weight_sync", "switch")
"""Phases in the metrics of every step. Phases that operations of further roles declare follow these."""


PERCENTILES = (50, 90, 99)
UNREADABLE = "unreadable"
"""Tool name in the metrics for calls that could not be read or that name no known tool."""


class StepMeter:
    """Measures the time and the samples between two step boundaries."""

    def __init__(self, cluster: Cluster, *, adds_verdicts: bool = False) -> None:
        """adds_verdicts: see LoopSettings."""
        self._cluster, self._adds_verdicts = cluster, adds_verdicts
        self._start_s = cluster.clock.now()
        self._ledger_builder = LedgerBuilder(
            cluster.lock,
            len(cluster.devices),
            [device.index for instance in cluster.place("rollout") for device in instance],
        )
        self._num_steps = 0
        self._evaluated = False
        self._ledger = Ledger()
        self._waits = WaitMeter()

    def start(self) -> None:
        self._start_s = self._book_boundary()

    def measure(self, batch: Batch, version: int, ended: Sequence[Ended], num_in_flight: int) -> Metrics:
        """Returns all metrics of a step that ends now, and closes its ledger.

        ended: samples that ended since the last step.

        num_in_flight: samples that were admitted and have not ended.

        Rewards and lengths include all scored samples, also of filtered groups. The trained samples alone would show
        neither the quality of the policy nor the cost of a filter.
        """
        records = self._take_records()
        spans, end_s = records.touching, records.end_s
        staleness_mean = sum(batch.staleness) / max(1, len(batch.staleness))
        staleness_max = max(batch.staleness, default=0)
        drawn = {"staleness mean": staleness_mean, "staleness max": staleness_max, "samples in flight": num_in_flight}
        self._cluster.timeline.end_step(
            StepRecord(step=batch.step + 1, start_s=self._start_s, end_s=end_s, counts=drawn)
        )
        samples = [entry.sample for entry in ended if entry.event in SCORED]
        lengths = [sample.num_sampled for sample in samples]
        num_tokens = sum([sample.num_total_tokens for sample in samples])
        step_s = max(end_s - self._start_s, 1e-9)
        trained = [entry.sample for entry in ended if entry.event == TerminalEvent.TRAINED]
        num_trained = sum(lengths) if len(trained) == len(samples) else sum([each.num_sampled for each in trained])
        num_lost = sum([entry.sample.num_sampled for entry in ended if entry.event != TerminalEvent.TRAINED])
        ledger = self._ledger_builder.step(records, num_trained, num_lost)
        self._num_steps += 1
        self._ledger = self._ledger.plus(ledger)
        counts = Counter(entry.event for entry in ended)
        return {
            "step": batch.step + 1,
            "version": version,
            **_rewards(samples, adds_verdicts=self._adds_verdicts),
            **_by_source(samples),
            **_measure_lengths(samples, lengths),
            **length_percentiles(lengths),
            **group_metrics(samples),
            **episode_metrics([sample.counts for sample in samples if sample.counts]),
            **batch.metrics,
            **self._measure_timing(spans, step_s, end_s),
            "perf/throughput": num_tokens / step_s,
            "perf/num_tokens": num_tokens,
            "perf/tokens_per_device_s": num_tokens / (step_s * len(self._cluster.devices)),
            "sched/in_flight": num_in_flight,
            "sched/queued_max": max([call.num_queued for call in records.served], default=0),
            "sched/oldest_wait_s": self._waits.take_oldest([entry.sample.key for entry in ended]),
            "sched/staleness_mean": staleness_mean,
            "sched/staleness_max": staleness_max,
            "sched/mixed_versions": _measure_mixed_share(trained),
            "sched/bubble": 1.0 - self._measure_busy(spans, end_s) / (step_s * len(self._cluster.devices)),
            **self._measure_memory(),
            **{f"samples/{event}": counts[event] for event in TerminalEvent},
            **ledger.metrics(),
            "goodput/trained_tokens_per_device_s": num_trained / (step_s * len(self._cluster.devices)),
        }

    def evaluating(self) -> None:
        """Records that engines serve an evaluation, so that the ledger counts the time between steps as such."""
        self._evaluated = True

    def finish(self) -> Ledger:
        """Returns the ledger of the run so far: startup, steps, and the time between steps."""
        self._book_boundary()
        return self._ledger

    def _book_boundary(self) -> float:
        """Adds the time between two steps to the ledger. Returns the end of that time, in seconds."""
        books, records = self._ledger_builder, self._take_records()
        ledger = books.between(records, evaluated=self._evaluated) if self._num_steps else books.startup(records)
        self._ledger, self._evaluated = self._ledger.plus(ledger), False
        return records.end_s

    def _take_records(self) -> Records:
        """Takes the records since the last call, and counts the waits of their requests.

        Engines also serve during an evaluation or a checkpoint, so the time between two steps has such requests too.
        """
        records = self._cluster.timeline.take()
        self._waits.add_calls(records.served)
        return records

    def _measure_timing(self, spans: Sequence[Span], step_s: float, end_s: float) -> Metrics:
        phases: dict[str, list[Span]] = {phase: [] for phase in PHASES}
        for span in spans:
            if span.phase:
                phases.setdefault(span.phase, []).append(span)
        busy = {f"timing_s/{phase}": busy_seconds(mine, self._start_s, end_s) for phase, mine in phases.items()}
        calls_s = [span.end_s - span.start_s for span in phases["reward"] if span.end_s <= end_s]  # others still run
        called = {"perf/reward_call_s": fsum(calls_s) / len(calls_s)} if calls_s else {}
        return {"timing_s/step": step_s, **busy, **called}

    def _measure_memory(self) -> Metrics:
        """Returns the bytes of each role that are loaded at the end of the step, summed over the devices."""
        found: Metrics = {}
        for device in self._cluster.devices:
            for group, parts in self._cluster.lock.list_loaded_parts(device.index).items():
                name = f"memory/{group.partition('/')[0]}"
                found[name] = found.get(name, 0) + sum(parts.values())
        return found

    def _measure_busy(self, spans: Sequence[Span], end_s: float) -> float:
        devices = by_device(spans, len(self._cluster.devices))
        return sum(busy_seconds(mine, self._start_s, end_s) for mine in devices)


class WaitMeter:
    """Measures the waits of requests for their engines."""

    def __init__(self) -> None:
        self._oldest_s = 0.0
        self._open: set[tuple[int, int, int]] = set()
        """Group, index and turn of begun turns: an engine that continues one after an interruption begins it again."""

    def add_calls(self, calls: Iterable[EngineCall]) -> None:
        for call in calls:
            for gid, number, turn, asked_s in call.begun:
                if (gid, number, turn) not in self._open:
                    self._open.add((gid, number, turn))
                    self._oldest_s = max(self._oldest_s, call.span.start_s - asked_s)

    def take_oldest(self, ended: Iterable[SampleKey]) -> float:
        """Returns the longest time from a request to the call that began its turn, in seconds; 0 if no turn began.

        ended: samples that ended. Both are counted since the last call of this method.
        """
        oldest_s, self._oldest_s = self._oldest_s, 0.0
        gone = set(ended)
        self._open = {each for each in self._open if SampleKey(each[0], each[1]) not in gone}
        return oldest_s


def group_metrics(samples: Sequence[Sample]) -> Metrics:
    """Returns the share of groups whose rewards are all equal, so that a group-relative advantage is 0.

    Counts groups with two or more scored samples; empty if there is none.
    """
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(sample.key.gid, []).append(float(np.float32(sample.reward)))  # as in advantages
    groups = [values for values in rewards.values() if len(values) > 1]
    if not groups:
        return {}
    return {"groups/zero_variance": sum([min(values) == max(values) for values in groups]) / len(groups)}


def length_percentiles(lengths: Sequence[int]) -> Metrics:
    """Returns the percentiles of the response lengths by the nearest rank, in tokens; empty without a response."""
    ordered = sorted(lengths)
    return {
        f"response_length/p{percent}": _find_percentile(ordered, percent)
        for percent in (PERCENTILES if ordered else ())
    }


def failure_rates(causes: Sequence[Cause | None]) -> Metrics:
    """Returns the share of ended samples that failed, for each cause that occurred. causes: None for other samples."""
    counts = Counter(cause for cause in causes if cause is not None)
    return {f"failed/{cause}": count / len(causes) for cause, count in sorted(counts.items())}


def _rewards(samples: Sequence[Sample], *, adds_verdicts: bool = False) -> Metrics:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return {}
    # The order in which samples end depends on the clock, and so would the last bit of a plain sum.
    mean = fsum(rewards) / len(rewards)
    spread = (fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    parts: Metrics = {}
    for name in sorted({name for sample in samples for name in sample.reward_parts}):
        measured = _list_judged(samples) if adds_verdicts and name == ACCURACY else samples
        values = [sample.reward_parts[name] for sample in measured if name in sample.reward_parts]
        if values:
            parts[name if "/" in name else f"reward/{name}"] = fsum(values) / len(values)
    return {"reward/mean": mean, "reward/std": spread, "reward/max": max(rewards), "reward/min": min(rewards), **parts}


def _list_judged(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Returns the samples of the sources whose reward function gave each response a verdict.

    A response without `reward.tag` is wrong also if the function returns numbers, and the share of right answers is
    unknown then.
    """
    without = {
        each.prompt.source
        for each in samples
        if each.reward is not None
        and ACCURACY not in each.reward_parts
        and (each.outcome is None or each.outcome.is_partial)  # else its episode gave the reward
    }
    return [sample for sample in samples if sample.prompt.source not in without]


def _by_source(samples: Sequence[Sample]) -> Metrics:
    """Returns the metrics of each source of a mixture; empty if the task has one source."""
    found: Metrics = {}
    for name in sorted({sample.prompt.source for sample in samples} - {""}):
        own = [sample for sample in samples if sample.prompt.source == name]
        rewards = [sample.reward for sample in own if sample.reward is not None]
        if rewards:
            found[f"source/{name}/reward"] = fsum(rewards) / len(rewards)
        found[f"source/{name}/response_length"] = sum([sample.num_sampled for sample in own]) / len(own)
        found[f"source/{name}/samples"] = len(own)
    return found


def _measure_lengths(samples: Sequence[Sample], lengths: Sequence[int]) -> Metrics:
    if not lengths:
        return {}
    cut = sum([sample.finish_reason == "length" for sample in samples])
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": max(lengths),
        "response_length/min": min(lengths),
        "response_length/clip_ratio": cut / len(lengths),
    }


def _measure_mixed_share(samples: Sequence[Sample]) -> float:
    """Returns the share of samples whose tokens are from more than one version of the weights."""
    return sum([len(set(sample.versions.values)) > 1 for sample in samples]) / max(1, len(samples))


def episode_metrics(counts: Sequence[EpisodeCounts]) -> Metrics:
    """Returns the metrics of `counts`, which has one entry per scored sample. Empty if no episode made the samples."""
    if not counts:
        return {}
    size = len(counts)
    history, reused = sum(each.history_tokens for each in counts), sum(each.reused_tokens for each in counts)
    calls, errors = Counter[str](), Counter[str]()
    for each in counts:
        calls.update(each.tool_calls)
        errors.update(each.tool_errors)
    seconds = sorted(second for each in counts for second in each.tool_s)
    turns = [each.num_turns for each in counts]
    return {
        "episode/turns_mean": sum(turns) / size,
        "episode/turns_max": max(turns),
        "episode/branches_mean": sum(each.num_branches for each in counts) / size,
        **({"episode/reused_share": reused / history} if history else {}),
        "episode/tool_calls": calls.total(),
        "episode/tool_errors": errors.total(),
        **{f"episode/tool_errors/{name or UNREADABLE}": errors[name] for name in sorted({*calls, *errors})},
        **({f"episode/tool_s_p{share}": _find_percentile(seconds, share) for share in (50, 99)} if seconds else {}),
    }


def _find_percentile(ordered: Sequence[float], percent: int) -> float:
    """Returns the smallest value that at least `percent` per cent of the values do not exceed (nearest rank)."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
