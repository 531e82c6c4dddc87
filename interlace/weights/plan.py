"""The plan of a weight transfer: which rank sends which part of a tensor to which rank. Pure: boxes in, moves out.

The writers' shards and the readers' needs are described as boxes of tensors in Hugging Face names. The plan is the
intersection of both: each element that a reader needs comes from exactly one writer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from interlace.core.errors import InterlaceError

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""Bytes of an element, by the name of its dtype in torch."""
ALIGNMENT = 64
"""Alignment in bytes; matrix products round differently at unaligned addresses."""


class Box(NamedTuple):
    """A block of a tensor: its start and its length along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the index of the block in the tensor, as slices."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def within(self, outer: Box) -> Box:
        """Returns the same block relative to the start of an enclosing block."""
        return Box(tuple(own - first for own, first in zip(self.start, outer.start, strict=True)), self.size)

    def intersect(self, other: Box) -> Box | None:
        """Returns the common block; None if the blocks do not overlap."""
        start, size = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            first = max(b, a)
            length = min(a + n, b + m) - first
            if length <= 0:
                return None
            start.append(first)
            size.append(length)
        return Box(tuple(start), tuple(size))

    def minus(self, hole: Box) -> Iterator[Box]:
        """Yields disjoint blocks that make up this block without the hole, which lies within it."""
        start, size = list(self.start), list(self.size)
        for axis, (first, length) in enumerate(zip(hole.start, hole.size, strict=True)):
            before, after = first - start[axis], start[axis] + size[axis] - first - length
            if before:
                yield Box(tuple(start), (*size[:axis], before, *size[axis + 1 :]))
            if after:
                yield Box((*start[:axis], first + length, *start[axis + 1 :]), (*size[:axis], after, *size[axis + 1 :]))
            start[axis], size[axis] = first, length


class Shard(NamedTuple):
    """A rank's block of a tensor."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name of the dtype in torch."""
    box: Box
    is_exact: bool = False
    """True for a tensor that no codec may round, such as the bias of a router."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the block."""
        return prod(self.box.size) * ITEM_BYTES[self.dtype]


class Move(NamedTuple):
    """A block that one writer rank sends to one reader rank."""

    name: str
    writer: int
    reader: int
    box: Box
    """Block of the whole tensor."""
    num_bytes: int


Side: TypeAlias = Sequence[Sequence[Shard]]
"""Shards of each rank of one side."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TransferPlan:
    """All moves of a publication. Made once for a pair of layouts; every version follows the same plan."""

    to_reader: tuple[tuple[_Delivery, ...], ...]
    """Deliveries of each reader rank, in the order of its shards."""
    digest: str
    """Hash of both layouts: two processes with the same digest have the same plan."""

    def moves_to(self, reader: int) -> Iterator[Move]:
        """Yields the moves that fill a reader rank, tensor by tensor."""
        for delivery in self.to_reader[reader]:
            shard = delivery.shard
            for writer, box, _ in delivery.route:
                yield Move(shard.name, writer, reader, box, prod(box.size) * ITEM_BYTES[shard.dtype])

    def moves(self) -> Iterator[Move]:
        for reader in range(len(self.to_reader)):
            yield from self.moves_to(reader)


_Route: TypeAlias = tuple[tuple[int, Box, Box], ...]
"""Pieces of a reader's block: the writer rank of each, the piece, and the block of that rank that contains it."""


class _Delivery(NamedTuple):
    shard: Shard
    route: _Route


def make_plan(writers: Side, readers: Side) -> TransferPlan:
    """Plans the moves. If several writers hold the same block, the one with the fewest bytes to send sends it.

    Raises InterlaceError if a reader needs an element that no writer holds, or a tensor of another shape.
    """
    held: dict[str, list[tuple[int, Box]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, shards in enumerate(writers):
        for name, shape, _, box, _ in shards:
            if name in held:
                held[name].append((rank, box))
            else:
                held[name], shapes[name] = [(rank, box)], shape
    grids: dict[tuple[tuple[int, Box], ...], _Grid] = {}
    grid_of: dict[str, _Grid] = {}
    for name, blocks in held.items():
        key = tuple(blocks)
        grid = grids.get(key)
        if grid is None:
            grid = grids[key] = _Grid(key, len(grids))
        grid_of[name] = grid
    loads = [0] * len(writers) if any(grid.has_replicas for grid in grids.values()) else None
    to_reader = []
    for shards in readers:
        deliveries = []
        for shard in shards:
            name, shape, _, box, _ = shard
            if shapes.get(name) != shape:
                raise _make_shape_error(shard, shapes)
            grid = grid_of[name]
            route = grid.routes.get(box) or grid.route(shard)
            deliveries.append(_Delivery(shard, route if loads is None else grid.balance_route(route, loads, shard)))
        to_reader.append(tuple(deliveries))
    return TransferPlan(to_reader=tuple(to_reader), digest=_hash_layouts(grid_of, readers))


class _Grid:
    """Blocks of a tensor that the writers hold. Tensors that are split alike share one grid and its routes."""

    def __init__(self, held: tuple[tuple[int, Box], ...], number: int) -> None:
        self.held, self.number = held, number
        ranks: dict[Box, list[int]] = {}
        for rank, box in held:
            ranks.setdefault(box, []).append(rank)
        self._ranks = ranks
        self.has_replicas = len(ranks) < len(held)
        self.routes: dict[Box, _Route] = {}
        """Pieces of each block computed so far, each piece with the first writer that holds it."""
        self._axis = _only_axis(tuple(ranks))
        self._order = sorted(ranks, key=lambda box: box.start[self._axis or 0]) if self._axis is not None else [*ranks]
        self._starts = [] if self._axis is None else [box.start[self._axis] for box in self._order]

    def route(self, shard: Shard) -> _Route:
        """Computes the disjoint pieces of a shard. Raises InterlaceError if an element is missing."""
        wanted = shard.box
        pieces = _cover_block(self._find_near(wanted), wanted, shard)
        found = self.routes[wanted] = tuple((self._ranks[held][0], box, held) for held, box in pieces)
        return found

    def balance_route(self, route: _Route, loads: list[int], shard: Shard) -> _Route:
        """Picks the writer of each piece, and adds the piece's bytes to the writer's load."""
        item, chosen = ITEM_BYTES[shard.dtype], []
        for _, box, held in route:
            able = self._ranks[held]
            rank = able[0] if len(able) == 1 else min(able, key=loads.__getitem__)
            loads[rank] += prod(box.size) * item
            chosen.append((rank, box, held))
        return tuple(chosen)

    def _find_near(self, wanted: Box) -> Sequence[Box]:
        """Returns the held blocks that may overlap the wanted one."""
        if self._axis is None:
            return self._order
        first = max(0, bisect_right(self._starts, wanted.start[self._axis]) - 1)
        last = bisect_right(self._starts, wanted.start[self._axis] + wanted.size[self._axis] - 1)
        return self._order[first:last]


def _cover_block(blocks: Sequence[Box], wanted: Box, shard: Shard) -> list[tuple[Box, Box]]:
    """Returns disjoint pieces that make up a block, as (held block that contains the piece, piece)."""
    pieces: list[tuple[Box, Box]] = []
    left = [wanted] if prod(wanted.size) else []
    for held in blocks:
        rest: list[Box] = []
        for part in left:
            shared = part.intersect(held)
            if shared is None:
                rest.append(part)
            else:
                pieces.append((held, shared))
                rest += () if shared == part else part.minus(shared)
        left = rest
        if not left:
            break
    if left:
        raise InterlaceError(
            f"weights: no trainer rank holds {left[0].size} of {shard.name} from {left[0].start} on, which an engine "
            "needs. The layouts of both sides do not belong to one model."
        )
    return pieces


def _only_axis(boxes: tuple[Box, ...]) -> int | None:
    """Returns the only dimension along which consecutive blocks differ; None if there is no such dimension."""
    if len(boxes) < 3:
        return None
    first, second = boxes[0], boxes[1]
    differing = [axis for axis, (a, b) in enumerate(zip(first.start, second.start, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    axis = differing[0]

    def rest(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*box.start[:axis], *box.start[axis + 1 :]), (*box.size[:axis], *box.size[axis + 1 :])

    common = rest(first)
    ordered = sorted(boxes, key=lambda box: box.start[axis])
    ends = [box.start[axis] + box.size[axis] for box in ordered]
    follow = all(end <= box.start[axis] for end, box in zip(ends, ordered[1:], strict=False))
    return axis if follow and all(rest(box) == common for box in boxes) else None


def _hash_layouts(grid_of: dict[str, _Grid], readers: Side) -> str:
    """Hashes both layouts; a layout shared by several tensors is hashed once."""
    lines = [f"{name} {grid.number}" for name, grid in grid_of.items()]
    lines += [repr(grid.held) for grid in dict.fromkeys(grid_of.values())]
    boxes: dict[Box, int] = {}
    for shards in readers:
        lines.append("reader")
        lines += [f"{name} {dtype} {boxes.setdefault(box, len(boxes))}" for name, _, dtype, box, _ in shards]
    return hashlib.sha256("\n".join([*lines, repr([*boxes])]).encode()).hexdigest()


def _make_shape_error(shard: Shard, shapes: dict[str, tuple[int, ...]]) -> InterlaceError:
    if shard.name not in shapes:
        return InterlaceError(f"weights: an engine needs {shard.name}, which no trainer rank holds.")
    return InterlaceError(
        f"weights: {shard.name} has shape {shapes[shard.name]} at the trainer and {shard.shape} at an engine."
    )
