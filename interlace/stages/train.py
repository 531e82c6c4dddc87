"""The training stage of one role, the actor or the critic, and its minibatches."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from interlace.core.random import permutation
from interlace.core.row import RowName
from interlace.core.types import Sample, SampleGroup
from interlace.rollouts.role_groups import ActorGroup, TrainedGroup
from interlace.runtime.channel import with_columns
from interlace.stages.batches import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Groups of one minibatch."""

    groups: Sequence[SampleGroup]
    """Groups in order of admission, because packing changes the last bits of the gradient's sum."""
    ends: bool
    """True if these groups end the minibatch, so that the optimizer step follows."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


class Minibatches:
    """Splits a batch into minibatches of equal group count. If groups are missing, the last minibatches are short.

    With `in_order`, minibatches are cut in order of admission, so they do not depend on the order of completion. A
    group is released once its minibatch is determined: all groups that can still come before it fit into the same
    minibatch. Without `in_order`, groups are released in the order in which the batch took them.
    """

    def __init__(self, batch: Batch, count: int, *, in_order: bool) -> None:
        """count: minibatches of a full batch. If it does not divide the batch size, the last minibatch is smaller."""
        self._batch = batch
        self.size = math.ceil(batch.size / count)
        """Groups per minibatch."""
        self._in_order = in_order and count > 1  # within one minibatch the order changes last bits only
        self._left: list[SampleGroup] = []
        self._num_seen = 0
        self.num_trained = 0
        """Groups that were released."""

    @property
    def num_left(self) -> int:
        """Groups of the batch that were not released yet, including groups that must still wait."""
        return len(self._batch.groups) - self.num_trained

    def ready(self) -> list[Part]:
        """Returns the parts that can be trained on now. For a closed batch, these are all remaining groups."""
        batch = self._batch
        self._left += batch.groups[self._num_seen :]
        self._num_seen = len(batch.groups)
        groups = {group.gid: group for group in self._left}
        order = sorted([*groups, *(() if batch.closed else batch.pending())]) if self._in_order else list(groups)
        parts: list[Part] = []
        start, end = 0, self.size - self.num_trained % self.size
        is_whole = True
        while is_whole and start < len(order):
            found = [groups[gid] for gid in order[start:end] if gid in groups]
            is_whole = len(found) == end - start
            if found:
                found.sort(key=attrgetter("gid"))
                parts.append(Part(groups=found, ends=is_whole or batch.closed))
            start, end = end, end + self.size
        if not parts and batch.closed and (self.num_trained % self.size or not self.num_trained):
            # An empty part closes the open minibatch. A batch whose groups were all dropped still counts as a step.
            parts = [Part(groups=[], ends=True)]
        return parts

    def take(self, parts: Sequence[Part]) -> None:
        """Removes the groups of these parts, which are trained on next."""
        gone = {group.gid for part in parts for group in part.groups}
        self._left = [group for group in self._left if group.gid not in gone]
        self.num_trained += len(gone)


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
            prepared = [part.samples for part in parts]
            if self._proximal:
                prepared = [await with_proximal(self._proximal, samples) if samples else [] for samples in prepared]
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
