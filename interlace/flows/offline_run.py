"""Interface of the offline flow: the trained model, its reference, and the rows of one run."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from interlace.algorithms.advantages import select_trained
from interlace.algorithms.base import Algorithm
from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.types import FloatArray, Metrics, Sample, SampleGroup, SampleKey, Segment, TerminalEvent
from interlace.flows.run import RoleGroups, shares_base
from interlace.flows.step_metrics import StepMeter
from interlace.flows.steps import Ended
from interlace.observe.goodput import Ledger
from interlace.runtime.cluster import Cluster
from interlace.stages.batches import Batch
from interlace.stages.factory import StageFactory

OF_POLICIES = ("kl", "step_ratio_mean", "ratio_mean", "ratio_max", "ess", "logprob_gap")
"""Metrics of a trained policy that compare it with the one that sampled, which given rows do not have."""


class OfflineObserver(Protocol):
    """Observer of each step boundary of an offline run."""

    async def on_offline_step(self, step: int, metrics: Metrics) -> bool:
        """Takes in the metrics of a step; returning False ends the run here. step: the first is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineRows:
    """Rows of a run as samples."""

    train: Iterator[Sample]
    """Rows in the order of training, without end."""
    heldout: Sequence[Sample]
    """Rows to evaluate on."""
    context: int | None = None
    """Tokens that the trained model and its reference can read. If None, there is no limit."""


class OfflineRun:
    """The roles of offline training."""

    def __init__(
        self,
        cluster: Cluster,
        stages: StageFactory,
        groups: RoleGroups,
        algorithm: Algorithm,
        rows: OfflineRows,
    ) -> None:
        self.rows, self._context = rows.train, rows.context
        self._cluster, self._groups, self._heldout = cluster, groups, rows.heldout
        self._needs_reference = algorithm.needs.reference
        self._needs_point = isinstance(algorithm, OfflineAlgorithm) and algorithm.uses_reference_point
        self._sizes = stages.sizes
        self._observer: OfflineObserver | None = None
        self.actor = stages.train_stage("actor", groups.actor, whole_batch=True)
        self._meter = StepMeter(cluster)
        self.num_rows = self._sizes.done_steps * self._sizes.prompts_per_step
        """Rows that were drawn, over all of a run's processes."""
        self._stopped = False

    def start(self, observer: OfflineObserver) -> None:
        """Sets the observer that is called at step boundaries, before the flow begins."""
        self._observer = observer

    @property
    def num_updates(self) -> int:
        """Steps of the optimizer that were begun, in this process."""
        return self.actor.num_updates

    async def batches(self, rows: Iterator[Sample]) -> AsyncIterator[Batch]:
        """Yields one closed batch for each step."""
        self._meter.start()
        for step in range(self._sizes.done_steps, self._sizes.num_steps):
            self._cluster.timeline.step = step + 1
            batch = Batch(step, self._sizes.prompts_per_step, self._cluster.waits, pending=list)
            for _ in range(batch.size):
                sample = replace(next(rows), key=SampleKey(self.num_rows, 0))
                batch.add(SampleGroup(gid=self.num_rows, step=step, samples=(sample,)), step)
                self.num_rows += 1
            batch.closed = True
            yield batch
            if self._stopped:
                break

    async def compare(self, batch: Batch) -> None:
        """Adds to the batch what its loss compares with: log-probs of the reference, and KTO's reference point."""
        samples = await self._add_logprobs([sample for group in batch.groups for sample in group.samples])
        batch.groups = [replace(group, samples=(sample,)) for group, sample in zip(batch.groups, samples, strict=True)]

    async def end_step(self, batch: Batch) -> None:
        """Ends the step: the observer gets its metrics."""
        samples = [sample for group in batch.groups for sample in group.samples]
        ended = [Ended(sample=sample, event=TerminalEvent.TRAINED) for sample in samples]
        found = self._meter.measure(batch, batch.step + 1, ended, 0)
        hidden = {f"actor/{name}" for name in OF_POLICIES}
        metrics = {name: value for name, value in found.items() if name not in hidden}
        if self._observer:
            self._stopped = not await self._observer.on_offline_step(batch.step + 1, metrics)
        self._meter.start()

    async def evaluate(self) -> Metrics:
        """Returns the loss and its metrics on the held-out rows, under the names of evaluations; {} without rows."""
        if not self._heldout:
            return {}
        self._meter.evaluating()
        found = await self._groups.actor.evaluate(await self._add_logprobs(self._heldout))
        return {f"eval/{name}": value for name, value in found.items()}

    def ledger(self) -> Ledger:
        """Returns the ledger of device-seconds from the start until now."""
        return self._meter.finish()

    async def _add_logprobs(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        if not self._needs_reference:
            return samples
        found = [
            replace(sample, ref_logprobs=logprobs)
            for sample, logprobs in zip(samples, await self._compute_reference(samples), strict=True)
        ]
        if not self._needs_point:
            return found
        point = await self._reference_point(found)
        return [replace(sample, values=np.full(sample.num_tokens, point, np.float32)) for sample in found]

    async def _compute_reference(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] of each sample, its share of the samples on each replica of the reference."""
        if shares_base(self._groups):
            return await self._groups.actor.base_logprobs(samples)
        replicas = self._groups.reference
        size = -(-len(samples) // len(replicas))
        shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        parts = await asyncio.gather(*(replicas[place].logprobs(share) for place, share in enumerate(shares)))
        return [logprobs for part in parts for logprobs in part]

    async def _reference_point(self, samples: Sequence[Sample]) -> float:
        """Computes the mean log ratio to the reference of completions below the prompts of other rows, at least 0.

        It is 0 if all rows have the same prompt.
        """
        mismatched = exchange_prompts(samples, self._context)
        if not mismatched:
            return 0.0
        policy, reference = await self._groups.actor.logprobs(mismatched), await self._compute_reference(mismatched)
        ratios = [
            float(select_trained(mine - theirs, sample).sum())
            for sample, mine, theirs in zip(mismatched, policy, reference, strict=True)
        ]
        return max(0.0, sum(ratios) / (2 * len(ratios)))


def exchange_prompts(samples: Sequence[Sample], context: int | None) -> list[Sample]:
    """Returns each row below the prompt of the next row that has another prompt; after the last row follows the first.

    If all rows have the same prompt, the result is empty.
    context: tokens of a prompt with one completion. The end of a longer completion is left out. None for no limit.
    """
    found, num_samples = [], len(samples)
    for place, sample in enumerate(samples):
        ids = sample.prompt.token_ids
        others = (samples[(place + distance) % num_samples] for distance in range(1, num_samples))
        other = next((each for each in others if not np.array_equal(each.prompt.token_ids, ids)), None)
        if other is not None:
            found.append(replace(sample, prompt=other.prompt, segments=_cut_segments(sample, other, context)))
    return found


def _cut_segments(sample: Sample, other: Sample, context: int | None) -> tuple[Segment, ...]:
    if context is None:
        return tuple(sample.segments)
    room = max(0, context - len(other.prompt.token_ids))
    return tuple(
        replace(each, token_ids=each.token_ids[:room], sampled=None if each.sampled is None else each.sampled[:room])
        for each in sample.segments
    )
