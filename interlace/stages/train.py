"""The training stage of one trained role (actor, critic)."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.random import permutation
from interlace.core.row import RowName
from interlace.core.types import Sample
from interlace.rollouts.role_groups import ActorGroup, TrainedGroup
from interlace.stages.batches import Batch
from interlace.stages.minibatches import Minibatches, Part


class TrainStage:
    """Stage that trains on a batch while it fills.

    The gradient of a minibatch is accumulated granule by granule: it is unnormalised until the minibatch is closed, so
    the result does not depend on the granules. Some algorithms need the whole batch first.

    Consumes: a batch (`update`).
    Produces: optimizer updates, and metrics of the step.
    Waits for: a granule of groups, or the whole batch; then devices.
    Unblocked by: groups that are added, the batch that closes, a stall (`flush`).
    """

    def __init__(
        self,
        group: TrainedGroup,
        *,
        granule: int,
        samples_per_prompt: int,
        minibatches: int,
        epochs: int = 1,
        in_order: bool,
        whole_batch: bool,
        proximal: ActorGroup | None,
    ) -> None:
        """granule: samples it waits for before it asks for its devices.

        epochs: passes over the batch; those after the first take its groups in another order, keyed by step and pass.
        in_order: minibatches are cut in order of admission, else as groups are taken.
        proximal: the group that recomputes log-probs under the weights at the start of the step, before the first
            update, so several minibatches need the whole batch; None where those of generation serve.
        """
        self._group, self._proximal = group, proximal
        self._granule_groups = math.ceil(granule / samples_per_prompt)
        self._minibatches, self._epochs, self._in_order = minibatches, epochs, in_order
        self._whole_batch = whole_batch or (proximal is not None and minibatches > 1)
        self.num_updates = 0
        """Steps of the optimizer that were begun."""
        self._flush = False
        self._waiting_for: Minibatches | None = None
        self._changed = lambda: None

    async def update(self, batch: Batch) -> None:
        """Trains one step on the batch; the worker's metrics go into `batch.metrics`."""
        minibatches = Minibatches(batch, self._minibatches, in_order=self._in_order)
        is_last = False
        trained: list[Sample] = []
        while not is_last:
            parts = await self._ready(batch, minibatches)
            minibatches.take(parts)
            is_last = batch.closed
            if parts:
                trained += await self._train(parts)
        for epoch in range(1, self._epochs if trained else 0):
            await self._train_again(batch.step, epoch, trained, minibatches.size)
        batch.metrics.update(await self._group.step_metrics())

    def flush(self) -> bool:
        """Trains on a partial granule, at a stall. False where there is none."""
        minibatches = self._waiting_for
        if minibatches is None or self._flush or self._whole_batch or not minibatches.ready():
            return False
        self._flush = True
        self._changed()
        return True

    async def _train(self, parts: Sequence[Part]) -> list[Sample]:
        """Trains on some of the batch; returns the samples as they were trained on."""
        async with self._group.hold("train"):
            # All of them before the first update: so they are of the weights at the start of the step.
            prepared = [await self._with_proximal(part.samples) for part in parts]
            await self._make_updates(prepared, [part.ends for part in parts])
        return [sample for samples in prepared for sample in samples]

    async def _train_again(self, step: int, epoch: int, samples: Sequence[Sample], size: int) -> None:
        """Makes one more pass over a batch. size: groups of a minibatch."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.key.gid, []).append(sample)
        gids = sorted(groups)
        order = [gids[place] for place in permutation(len(gids), "epoch", step, epoch)]
        minibatches = [
            [sample for gid in sorted(order[start : start + size]) for sample in groups[gid]]
            for start in range(0, len(order), size)
        ]
        async with self._group.hold("train"):
            await self._make_updates(minibatches, [True] * len(minibatches))

    async def _make_updates(self, parts: Sequence[list[Sample]], ends: Sequence[bool]) -> None:
        """Trains on parts of minibatches, each while the next is laid out. ends: True at a minibatch's last part."""
        is_prepared = False
        for place, samples in enumerate(parts):
            if samples:
                following = next(filter(None, parts[place + 1 :]), None)
                given = [RowName.of(sample) for sample in samples] if is_prepared else samples
                computing = self._group.accumulate(given, is_prepared)
                if is_prepared := following is not None:
                    # Both at once, so that neither fails unheard where the other has failed already.
                    await asyncio.gather(computing, self._group.prepare(following))
                else:
                    await computing
            if ends[place]:
                self.num_updates += 1
                await self._group.optimizer_step()

    async def _with_proximal(self, samples: list[Sample]) -> list[Sample]:
        return samples if self._proximal is None or not samples else await with_proximal(self._proximal, samples)

    async def _ready(self, batch: Batch, minibatches: Minibatches) -> list[Part]:
        """Returns the next granule; the remainder of a closed batch; or, at a stall, what there is."""
        self._waiting_for, self._changed = minibatches, batch.changed.fire
        need = batch.size if self._whole_batch else min(self._granule_groups, batch.size - minibatches.num_trained)
        while True:
            if batch.closed or self._flush or minibatches.num_left >= need:
                parts = minibatches.ready()
                if batch.closed or self._flush:
                    break
                # The start of a minibatch is a granule by itself, or waits: whole minibatches are summed in one order.
                if parts and not parts[-1].ends and len(parts[-1].groups) < need:
                    parts.pop()
                if sum(len(part.groups) for part in parts) >= need:
                    break
            await batch.changed.wait(who=self._group.name, what=f"{need} groups of step {batch.step}")
        self._waiting_for, self._flush = None, False
        return parts


async def with_proximal(group: ActorGroup, samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples with their log-probs under the present weights of a group."""
    logprobs = await group.logprobs(samples)
    return [replace(sample, proximal_logprobs=found) for sample, found in zip(samples, logprobs, strict=True)]
