"""A batch cut into minibatches while it fills."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.types import Sample, SampleGroup
from interlace.stages.batches import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Groups of one minibatch."""

    groups: Sequence[SampleGroup]
    """In order of admission: how samples are packed moves the last bits of their sum."""
    ends: bool
    """True if these groups are the minibatch's last: the optimizer's step follows."""

    @property
    def samples(self) -> list[Sample]:
        """Samples of all the groups."""
        return [sample for group in self.groups for sample in group.samples]


class Minibatches:
    """Minibatches of equally many groups; a batch that is short of some has fewer, of which the last may be smaller.

    In order of admission they are the same whatever finished first: a group may go once so few that were admitted
    before it can still come that they share its minibatch. Else the groups go in the order in which they were taken.
    """

    def __init__(self, batch: Batch, count: int, *, in_order: bool) -> None:
        """count: minibatches of a full batch; where its size cannot be divided by it, the last is smaller."""
        self._batch = batch
        self.size = math.ceil(batch.size / count)
        """Groups of a minibatch."""
        self._in_order = in_order and count > 1  # in one minibatch the order changes nothing but last bits
        self._left: list[SampleGroup] = []
        self._num_seen = self._num_trained = 0

    @property
    def num_trained(self) -> int:
        """Groups that went."""
        return self._num_trained

    @property
    def num_left(self) -> int:
        """Groups that are there and have not gone; perhaps not all of them may go."""
        return len(self._batch.groups) - self._num_trained

    def ready(self) -> list[Part]:
        """Returns the parts that may go now; of a closed batch, all of its rest."""
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
                found.sort(key=lambda group: group.gid)
                parts.append(Part(groups=found, ends=is_whole or batch.closed))
            start, end = end, end + self.size
        if not parts and batch.closed and (self._num_trained % self.size or not self._num_trained):
            # What is open is closed; and a batch all of whose groups were dropped is still a step, and counted as such.
            parts = [Part(groups=[], ends=True)]
        return parts

    def take(self, parts: Sequence[Part]) -> None:
        """Takes out the groups that go."""
        gone = {group.gid for part in parts for group in part.groups}
        self._left = [group for group in self._left if group.gid not in gone]
        self._num_trained += len(gone)
