"""Division of a batch into minibatches while the batch fills."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from interlace.core.types import Sample, SampleGroup
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
        """Samples of all the groups."""
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
        self._num_seen = self._num_trained = 0

    @property
    def num_trained(self) -> int:
        """Groups that were released."""
        return self._num_trained

    @property
    def num_left(self) -> int:
        """Groups of the batch that were not released yet, including groups that must still wait."""
        return len(self._batch.groups) - self._num_trained

    def ready(self) -> list[Part]:
        """Returns the parts that can be trained on now. For a closed batch, these are all remaining groups."""
        batch = self._batch
        self._left += batch.groups[self._num_seen :]
        self._num_seen = len(batch.groups)
        groups = {group.gid: group for group in self._left}
        order = sorted([*groups, *(() if batch.closed else batch.pending())]) if self._in_order else list(groups)
        parts: list[Part] = []
        start, end = 0, self.size - self._num_trained % self.size
        is_whole = True
        while is_whole and start < len(order):
            found = [groups[gid] for gid in order[start:end] if gid in groups]
            is_whole = len(found) == end - start
            if found:
                found.sort(key=attrgetter("gid"))
                parts.append(Part(groups=found, ends=is_whole or batch.closed))
            start, end = end, end + self.size
        if not parts and batch.closed and (self._num_trained % self.size or not self._num_trained):
            # An empty part closes the open minibatch. A batch whose groups were all dropped still counts as a step.
            parts = [Part(groups=[], ends=True)]
        return parts

    def take(self, parts: Sequence[Part]) -> None:
        """Removes the groups of these parts, which are trained on next."""
        gone = {group.gid for part in parts for group in part.groups}
        self._left = [group for group in self._left if group.gid not in gone]
        self._num_trained += len(gone)
