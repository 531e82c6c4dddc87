"""The training stage of one trained role (actor, critic)."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from interlace.core.types import Sample, SampleGroup
from interlace.runtime.group import WorkerGroup
from interlace.runtime.stages.batches import Batch


def slices(groups: list[SampleGroup], count: int) -> list[list[SampleGroup]]:
    """Minibatches: `count` slices, as even as can be, in order of admission; fewer where there are fewer groups."""
    ordered = _in_order(groups)
    count = min(count, len(ordered))
    bounds = [round(place * len(ordered) / count) for place in range(count + 1)] if count else []
    return [ordered[low:high] for low, high in pairwise(bounds)]


def _in_order(groups: list[SampleGroup]) -> list[SampleGroup]:
    """Of admission, not of arrival."""
    return sorted(groups, key=lambda group: group.gid)


def _samples(groups: list[SampleGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


class TrainStage:
    """Trains on a batch while it fills.

    With one minibatch the gradient is accumulated granule by granule: it is unnormalised until the batch is closed, so
    the result does not depend on the granules. Several minibatches, or statistics of the batch, need it whole first.
    """

    def __init__(
        self,
        group: WorkerGroup[Any],
        *,
        granule: int,
        samples_per_prompt: int,
        minibatches: int,
        whole_batch: bool,
        recompute_proximal: bool,
    ) -> None:
        """granule: samples it waits for before it asks for its devices.

        recompute_proximal: log-probs under the weights at the start of the step are computed before the first update.
        """
        self._group, self._recompute_proximal = group, recompute_proximal
        self._granule_groups = math.ceil(granule / samples_per_prompt)
        self._minibatches = minibatches
        self._whole_batch = whole_batch or minibatches > 1
        self._flush = False
        self._waiting_for: Batch | None = None
        self._position = 0

    async def update(self, batch: Batch) -> None:
        """One step on the batch; the worker's metrics go into `batch.metrics`."""
        self._position = 0
        if self._whole_batch:
            await self._until_ready(batch, batch.size)
            # A batch all of whose groups were dropped is still a step: its one empty minibatch is counted as skipped.
            parts = [_samples(part) for part in slices(batch.groups, self._minibatches)] or [[]]
            async with self._group.hold("train"):
                parts = [await self._with_proximal(part) for part in parts]
                for part in parts:
                    await self._group.accumulate(part)
                    await self._group.optimizer_step()
        else:
            await self._stream(batch)
        batch.metrics.update(await self._group.step_metrics())

    def flush(self) -> bool:
        """At a stall: trains on a partial granule. False where there is none."""
        batch = self._waiting_for
        if batch is None or self._flush or self._whole_batch or len(batch.groups) == self._position:
            return False
        self._flush = True
        batch.changed.fire()
        return True

    async def _stream(self, batch: Batch) -> None:
        while True:
            await self._until_ready(batch, self._granule_groups)
            # How a granule is packed moves the last bits of its sum: with a whole step as granule two runs are equal.
            part = _in_order(batch.groups[self._position :])
            self._position += len(part)
            is_last = batch.closed
            async with self._group.hold("train"):
                if part:
                    await self._group.accumulate(await self._with_proximal(_samples(part)))
                if is_last:
                    await self._group.optimizer_step()
                    return

    async def _with_proximal(self, samples: list[Sample]) -> list[Sample]:
        """Before the step's first update, so under the weights at its start."""
        if not self._recompute_proximal:
            return samples
        logprobs = await self._group.logprobs(samples)
        return [replace(sample, proximal_logprobs=found) for sample, found in zip(samples, logprobs, strict=True)]

    async def _until_ready(self, batch: Batch, num_groups: int) -> None:
        self._waiting_for = batch
        need = min(num_groups, batch.size - self._position)
        while not batch.closed and not self._flush and len(batch.groups) - self._position < need:
            await batch.changed.wait(who=self._group.name, what=f"{need} groups of step {batch.step}")
        self._waiting_for, self._flush = None, False
