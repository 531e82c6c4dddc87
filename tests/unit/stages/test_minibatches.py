"""Minibatches are formed while a batch fills."""

import math

from hypothesis import given
from hypothesis import strategies as st

from interlace.core.types import SampleGroup
from interlace.runtime.waits import WaitRegistry
from interlace.stages.batches import Batch
from interlace.stages.train import Minibatches


class Stopped:
    """A clock; nobody waits here."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Filling:
    """A batch whose groups finish, or are dropped and replaced or not, in any order."""

    def __init__(self, size: int, count: int, *, in_order: bool) -> None:
        self.live = list(range(size))
        waits = WaitRegistry(Stopped())
        self.batch = Batch(0, size, waits, pending=lambda: sorted(self.live))
        self.minibatches = Minibatches(self.batch, count, in_order=in_order)
        self.next_gid = size
        self.trained: list[list[int]] = [[]]
        """Of each minibatch; the last is open."""

    def finish(self, gid: int) -> None:
        self.live.remove(gid)
        self.batch.add(SampleGroup(gid=gid, step=0, samples=()), 0)
        self.batch.closed = self.batch.num_missing == 0

    def drop(self, gid: int, *, replaced: bool) -> None:
        self.live.remove(gid)
        if replaced:
            self.live.append(self.next_gid)
            self.next_gid += 1
        else:
            self.batch.num_empty += 1
        self.batch.closed = self.batch.num_missing == 0

    def train(self) -> None:
        parts = self.minibatches.ready()
        self.minibatches.take(parts)
        for part in parts:
            self.trained[-1] += [group.gid for group in part.groups]
            if part.ends:
                self.trained.append([])


def filled(data: st.DataObject, size: int, count: int, *, in_order: bool) -> Filling:
    filling = Filling(size, count, in_order=in_order)
    while filling.live:
        gid = data.draw(st.sampled_from(filling.live))
        becomes = data.draw(st.sampled_from(["finished", "finished", "finished", "replaced", "dropped"]))
        if becomes == "finished" or filling.next_gid > 4 * size:
            filling.finish(gid)
        else:
            filling.drop(gid, replaced=becomes == "replaced")
        if filling.batch.closed or data.draw(st.booleans()):
            filling.train()
    assert not filling.trained.pop(), "a minibatch stays open"
    return filling


def slices(gids: list[int], size: int, count: int) -> list[list[int]]:
    width = math.ceil(size / count)
    return [gids[start : start + width] for start in range(0, len(gids), width)] or [[]]


@given(st.data(), st.integers(1, 8), st.integers(1, 4))
def test_they_are_slices_in_order_of_admission_whatever_finishes_first(
    data: st.DataObject, size: int, count: int
) -> None:
    filling = filled(data, size, count, in_order=True)
    kept = sorted(group.gid for group in filling.batch.groups)
    found = [sorted(minibatch) for minibatch in filling.trained]
    assert found == slices(kept, size, count)


@given(st.data(), st.integers(1, 8), st.integers(1, 4))
def test_where_order_decides_nothing_they_are_slices_as_the_groups_were_taken(
    data: st.DataObject, size: int, count: int
) -> None:
    filling = filled(data, size, count, in_order=False)
    taken = slices([group.gid for group in filling.batch.groups], size, count)
    assert [sorted(minibatch) for minibatch in filling.trained] == [sorted(minibatch) for minibatch in taken]


def test_nobody_waits_for_groups_that_cannot_change_a_minibatch() -> None:
    filling = Filling(6, 3, in_order=True)
    filling.finish(1)
    filling.finish(2)
    filling.train()
    assert filling.trained == [[1]], "0 may come, and then 2 belongs to the second minibatch"
    filling.drop(0, replaced=True)
    filling.train()
    assert filling.trained == [[1, 2], []], "6 replaces it, at the end"
