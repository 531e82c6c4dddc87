"""The training stage of one role: the actor or the critic."""

import asyncio
import math
from collections.abc import Sequence

from interlace.core.random import permutation
from interlace.core.row import RowName
from interlace.core.types import Sample
from interlace.rollouts.role_groups import ActorGroup, TrainedGroup
from interlace.runtime.channel import with_columns
from interlace.stages.batches import Batch
from interlace.stages.minibatches import Minibatches, Part


class TrainStage:
    """Trains on a batch while the batch fills.

    The gradient of a minibatch is accumulated in granules and normalised when the minibatch closes, so the result does
    not depend on the granules. Some algorithms need the whole batch first.

    Consumes: a batch (`update`).
    Produces: optimizer updates, and metrics of the step.
    Waits for: a granule of groups, or the whole batch, then devices.
    Released by: groups added to the batch, the close of the batch, a stall (`flush`).
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
        """granule: number of samples that the stage waits for before it requests its devices.

        epochs: passes over the batch. Later passes shuffle the groups by a key of step and pass.
        in_order: if True, minibatches are cut in order of admission, else in the order in which groups are taken.
        proximal: group that recomputes log-probs under the weights at the start of the step. With several minibatches
            this needs the whole batch before the first update. If None, the log-probs of generation are used.
        """
        self._group, self._proximal = group, proximal
        self._granule_groups = math.ceil(granule / samples_per_prompt)
        self._minibatches, self._epochs, self._in_order = minibatches, epochs, in_order
        self._whole_batch = whole_batch or (proximal is not None and minibatches > 1)
        self.num_updates = 0
        """Optimizer steps that were started."""
        self._flush = False
        self._waiting_for: tuple[Batch, Minibatches] | None = None
        """Batch whose groups the stage waits for, and its minibatches."""

    async def update(self, batch: Batch) -> None:
        """Trains one step on the batch.

        Consumes: the open batch, group by group.
        Produces: optimizer updates, and metrics in `batch.metrics`.
        Waits for: a granule of groups, or the whole batch, then the devices of the role.
        Released by: groups added to the batch, the close of the batch, a stall.
        """
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
        """Releases a partial granule for training, at a stall. Returns whether it released groups."""
        if self._waiting_for is None or self._flush or self._whole_batch:
            return False
        batch, minibatches = self._waiting_for
        if not minibatches.ready():
            return False
        self._flush = True
        batch.changed.fire()
        return True

    async def _train(self, parts: Sequence[Part]) -> list[Sample]:
        """Trains on parts of the batch. Returns their samples with the proximal log-probs that were used."""
        async with self._group.hold("train"):
            # Log-probs of all parts precede the first update, so they are under the weights at the start of the step.
            prepared = [await self._with_proximal(part.samples) for part in parts]
            await self._make_updates(prepared, [part.ends for part in parts])
        return [sample for samples in prepared for sample in samples]

    async def _train_again(self, step: int, epoch: int, samples: Sequence[Sample], size: int) -> None:
        """Trains one more pass over a batch. size: groups per minibatch."""
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
        """Trains on parts and prepares each next part meanwhile. ends: True for the last part of a minibatch."""
        is_prepared = False
        for place, samples in enumerate(parts):
            if samples:
                following = next(filter(None, parts[place + 1 :]), None)
                given = [RowName.of(sample) for sample in samples] if is_prepared else samples
                computing = self._group.accumulate(given, is_prepared)
                if is_prepared := following is not None:
                    # Awaited together, so that both errors are retrieved if both calls fail.
                    await asyncio.gather(computing, self._group.prepare(following))
                else:
                    await computing
            if ends[place]:
                self.num_updates += 1
                await self._group.optimizer_step()

    async def _with_proximal(self, samples: list[Sample]) -> list[Sample]:
        return samples if self._proximal is None or not samples else await with_proximal(self._proximal, samples)

    async def _ready(self, batch: Batch, minibatches: Minibatches) -> list[Part]:
        """Returns the next granule, or all groups that are ready if the batch is closed or a stall flushes it."""
        self._waiting_for = batch, minibatches
        need = batch.size if self._whole_batch else min(self._granule_groups, batch.size - minibatches.num_trained)
        while True:
            if batch.closed or self._flush or minibatches.num_left >= need:
                parts = minibatches.ready()
                if batch.closed or self._flush:
                    break
                # The start of a minibatch waits for a granule, because whole minibatches are summed in one order.
                if parts and not parts[-1].ends and len(parts[-1].groups) < need:
                    parts.pop()
                if sum(len(part.groups) for part in parts) >= need:
                    break
            await batch.changed.wait(who=self._group.name, what=f"{need} groups of step {batch.step}")
        self._waiting_for, self._flush = None, False
        return parts


class SkippedStage:
    """Takes the place of a TrainStage if the algorithm trains from the replay alone: waits for the whole batch."""

    num_updates = 0

    async def update(self, batch: Batch) -> None:
        """Returns when the batch is closed.

        Consumes: the open batch.
        Produces: nothing. The line `replay.learn` trains.
        Waits for: the close of the batch.
        Released by: groups added to the batch, the end of the data.
        """
        while not batch.closed:
            await batch.changed.wait(who="actor", what=f"the whole batch of step {batch.step}")


async def with_proximal(group: ActorGroup, samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples with `proximal_logprobs` under the current weights of a group."""
    logprobs = await group.logprobs(samples)
    return [with_columns(sample, {"proximal_logprobs": found}) for sample, found in zip(samples, logprobs, strict=True)]
