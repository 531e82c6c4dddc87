"""In a plan, every element of every reader comes from exactly one writer that has it."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.errors import InterlaceError
from interlace.weights.plan import Box, Shard, Side, make_plan


def cut(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A grid of blocks, dealt as torch.chunk does: the last ones may be smaller, or empty."""
    boxes = [Box((), ())]
    for length, count in zip(shape, parts, strict=True):
        step = -(-length // count)
        edges = [min(number * step, length) for number in range(count + 1)]
        pieces = list(pairwise(edges))
        boxes = [Box((*b.start, lo), (*b.size, hi - lo)) for b in boxes for lo, hi in pieces]
    return boxes


@st.composite
def side(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], *, whole_cover: bool) -> Side:
    """Up to 64 ranks; each tensor has a grid of its own, replicated over what ranks are left, in any order."""
    num_ranks = draw(st.integers(1, 64))
    ranks: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        parts = [1] * len(shape)
        for axis in range(len(shape)):
            room = num_ranks // prod(parts)
            parts[axis] = draw(st.integers(1, max(1, room)))
        boxes = cut(shape, tuple(parts))
        shift = draw(st.integers(0, num_ranks - 1))
        for rank in range(num_ranks):
            if whole_cover or draw(st.booleans()):
                box = boxes[(rank + shift) % len(boxes)]
                ranks[rank].append(Shard(name, shape, "bfloat16", box))
    return ranks


shapes = st.dictionaries(
    st.sampled_from([f"layer.{n}.weight" for n in range(6)]),
    st.lists(st.integers(1, 13), min_size=0, max_size=3).map(tuple),
    min_size=1,
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_element_of_every_reader_is_given_exactly_once(data: st.DataObject) -> None:
    named = data.draw(shapes)
    writers = data.draw(side(named, whole_cover=True))
    readers = data.draw(side(named, whole_cover=False))
    plan = make_plan(writers, readers)
    held = [{shard.name: shard.box for shard in shards} for shards in writers]
    moved = 0
    for rank, shards in enumerate(readers):
        counts = {shard.name: np.zeros(shard.shape, int) for shard in shards}
        for move in plan.moves_to(rank):
            assert held[move.writer][move.name].intersect(move.box) == move.box, "the writer holds what it gives"
            counts[move.name][move.box.slices] += 1
            moved += move.num_bytes
        for shard in shards:
            inside = counts[shard.name][shard.box.slices]
            assert (inside == 1).all() and counts[shard.name].sum() == inside.size
    assert moved == sum(shard.num_bytes for shards in readers for shard in shards)  # moved / needed = 1.00
    assert plan.digest == make_plan(writers, readers).digest


def whole(name: str, shape: tuple[int, ...]) -> Shard:
    return Shard(name, shape, "float32", Box((0,) * len(shape), shape))


def test_blocks_that_overlap_in_part_are_given_once() -> None:
    left, right = Box((0, 0), (4, 5)), Box((0, 3), (4, 5))
    writers = [[Shard("w", (4, 8), "float32", left)], [Shard("w", (4, 8), "float32", right)]]
    moves = list(make_plan(writers, [[whole("w", (4, 8))]]).moves())
    counts = np.zeros((4, 8), int)
    for move in moves:
        counts[move.box.slices] += 1
    assert (counts == 1).all()


def test_replicas_share_the_sending() -> None:
    writers = [[whole(f"w{n}", (16, 16)) for n in range(40)] for _ in range(4)]
    sent = [0] * 4
    for move in make_plan(writers, [writers[0]] * 3).moves():
        sent[move.writer] += move.num_bytes
    assert max(sent) == min(sent)


def test_the_digest_tells_other_layouts_apart() -> None:
    writers = [[whole("w", (4, 4))], [whole("w", (4, 4))]]
    cut_writers = [[Shard("w", (4, 4), "float32", box)] for box in cut((4, 4), (2, 1))]
    readers = [[whole("w", (4, 4))]]
    digests = {make_plan(w, r).digest for w in (writers, writers[:1], cut_writers) for r in (readers, readers * 2)}
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("writers", "reader", "message"),
    [
        ([[Shard("w", (4,), "float32", Box((0,), (3,)))]], whole("w", (4,)), "no trainer rank holds"),
        ([[whole("w", (4,))]], whole("v", (4,)), "needs v, which no trainer rank holds"),
        ([[whole("w", (4,))]], whole("w", (5,)), "has shape"),
    ],
)
def test_layouts_that_do_not_belong_together_are_refused(writers: Side, reader: Shard, message: str) -> None:
    with pytest.raises(InterlaceError, match=message):
        make_plan(writers, [[reader]])
