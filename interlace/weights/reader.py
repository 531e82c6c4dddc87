"""An engine rank's reader: fetches the needed blocks from all trainer ranks, and commits them all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from interlace.core.errors import InterlaceError
from interlace.weights.codecs.base import Piece, codec_named
from interlace.weights.content import content_hash
from interlace.weights.plan import Box, Move, Shard, TransferPlan, make_plan
from interlace.weights.ref import WeightPart, WeightRef
from interlace.weights.shards import ShapedTensors
from interlace.weights.transports.base import Lease, Receiver, transport_named

if TYPE_CHECKING:
    from torch import Tensor


class ReadWeights(ShapedTensors):
    """One version, as an engine loads it. A tensor is assembled when it is read."""

    def __init__(self, needs: Sequence[Shard], fetched: Mapping[str, Sequence[_Fetched]], *, frozen: bool) -> None:
        super().__init__({shard.name: tuple(shard.box.size) for shard in needs})
        self._needs = {shard.name: shard for shard in needs}
        self._fetched = fetched
        self.frozen = frozen
        """True if the tensors are never written to again, so that an engine may serve from them."""

    def __getitem__(self, name: str) -> Tensor:
        shard, pieces = self._needs[name], self._fetched[name]
        if len(pieces) == 1 and pieces[0].box == shard.box:
            return pieces[0].decode()
        whole = torch.empty(shard.box.size, dtype=getattr(torch, shard.dtype))
        for piece in pieces:
            whole[piece.box.within(shard.box).slices] = piece.decode()
        return whole


class _Fetched(NamedTuple):
    """A block of a tensor, received from one trainer rank."""

    name: str
    box: Box
    decode: Callable[[], Tensor]
    """Returns the decoded block."""


class WeightReader:
    """One rank's reader. Every version follows the plan that was made for the first one."""

    def __init__(
        self,
        needs: Sequence[Shard] | None = None,
        *,
        number: int = 0,
        num_readers: int = 1,
        is_served: bool = False,
    ) -> None:
        """needs: the rank's blocks. If None, every tensor, whole. number, num_readers: index and number of engines with
        the same needs, which divide the load among the trainer's replicas. is_served: an engine generates with a
        version while the next one is read."""
        self._needs, self._number, self._num_readers = needs, number, num_readers
        self._layout: list[tuple[Shard, ...]] = []
        self._plan: TransferPlan | None = None
        self._wanted: tuple[Shard, ...] = ()
        self._receivers: dict[str, Receiver] = {}
        self._leases: list[Lease] = []
        self._mirror = Mirror(is_served=is_served)

    @contextmanager
    def open(self, ref: WeightRef) -> Iterator[ReadWeights]:
        """Fetches a version, which the body of the context loads. If the body raises, the previous version stays valid.

        Raises InterlaceError if part of the version cannot be fetched.
        """
        plan = self._plan_transfer(ref)
        new: list[Lease] = []
        try:
            yield self._read_parts(ref, plan, new)
        except BaseException:
            self._mirror.discard()
            for lease in new:
                lease.close()
            raise
        self._mirror.commit()
        old, self._leases = self._leases, new
        for lease in old:
            lease.close()

    def _plan_transfer(self, ref: WeightRef) -> TransferPlan:
        layout = [tuple(part.shards) for part in ref.parts]
        if self._plan is None or layout != self._layout:
            wanted = tuple(self._needs) if self._needs is not None else _every_tensor(ref.parts)
            self._plan = make_plan(layout, [wanted] * self._num_readers)
            self._layout, self._wanted = layout, wanted
            self._mirror.clear()
        return self._plan

    def _read_parts(self, ref: WeightRef, plan: TransferPlan, leases: list[Lease]) -> ReadWeights:
        moves: list[list[Move]] = [[] for _ in ref.parts]
        for move in plan.moves_to(self._number):
            moves[move.writer].append(move)
        steps = [self._list_steps(part) for part in ref.parts]
        # Fetch and check everything before the mirror is changed.
        opened = [
            [self._fetch_blocks(step, own, leases) for step in its] if own else []
            for its, own in zip(steps, moves, strict=True)
        ]
        fetched: dict[str, list[_Fetched]] = {}
        for part, its, own, given in zip(ref.parts, steps, moves, opened, strict=True):
            if own:
                for block in self._iterate_blocks(part, its, own, given):
                    fetched.setdefault(block.name, []).append(block)
        return ReadWeights(
            self._wanted,
            {shard.name: fetched.get(shard.name, ()) for shard in self._wanted},
            frozen=all(part.frozen for part in ref.parts),
        )

    def _list_steps(self, part: WeightPart) -> list[WeightPart]:
        """Returns the parts to apply, in order, starting from a whole part or from the mirror."""
        steps = [part]
        for earlier in reversed(part.behind):
            if steps[-1].base is None or self._mirror.holds(earlier):
                return steps[::-1]
            steps.append(earlier)
        is_left_out = steps[-1] is not part and steps[-1].source is None  # the engine had read it, and was restarted
        if steps[-1].base is not None or is_left_out:
            raise InterlaceError(
                f"weights: version {part.version} is a delta on version {part.base} of trainer rank {part.rank}, which "
                "this engine does not have and which did not come along. It keeps its current weights."
            )
        return steps[::-1]

    def _fetch_blocks(self, part: WeightPart, moves: Sequence[Move], leases: list[Lease]) -> list[list[Tensor]]:
        """Receives the blocks from a trainer rank, in the order of the moves."""
        held = {shard.name: shard for shard in part.shards}
        decoder = codec_named(part.codec).decoder()
        wanted: list[list[Piece]] = [list(decoder.pieces(held[move.name], move.box)) for move in moves]
        receiver = self._receivers.get(part.transport)
        if receiver is None:
            receiver = self._receivers[part.transport] = transport_named(part.transport).receiver()
        lease = receiver.open(part, [*chain.from_iterable(wanted)])
        tensors = iter(lease.tensors)
        given = [[next(tensors) for _ in pieces] for pieces in wanted]
        if lease.borrows:  # other memory is freed when no tensor uses it, such as once parts are joined
            leases.append(lease)
        whole = len(moves) == len(held)  # else only some of the hashed content was fetched
        if part.base is not None and whole and content_hash(chain.from_iterable(given)) != part.checksum:
            raise InterlaceError(
                f"weights: the delta of version {part.version} from trainer rank {part.rank} arrived broken."
            )
        return given

    def _iterate_blocks(
        self, part: WeightPart, steps: Sequence[WeightPart], moves: Sequence[Move], given: Sequence[list[list[Tensor]]]
    ) -> Iterator[_Fetched]:
        if part.base is not None or part.is_base:
            for move, block in zip(moves, self._mirror.apply(steps, moves, given), strict=True):
                yield _Fetched(move.name, move.box, block.detach)
            return
        held, decoder = {shard.name: shard for shard in part.shards}, codec_named(part.codec).decoder()
        for move, pieces in zip(moves, given[-1], strict=True):
            yield _Fetched(move.name, move.box, partial(decoder.decode, held[move.name], move.box, pieces, None))

    def close(self) -> None:
        """Releases the memory that the engine served from."""
        for lease in self._leases:
            lease.close()
        for receiver in self._receivers.values():
            receiver.close()


def _every_tensor(parts: Sequence[WeightPart]) -> tuple[Shard, ...]:
    """Returns every tensor of which any trainer rank holds a block, whole, in order of first occurrence."""
    found: dict[str, Shard] = {}
    for part in parts:
        for shard in part.shards:
            found.setdefault(shard.name, shard._replace(box=Box.of(shard.shape)))
    return tuple(found.values())


Blocks: TypeAlias = "dict[tuple[int, Move], Tensor]"
"""Trainer rank and move -> block."""


class Mirror:
    """Blocks of the last version, on the host. Empty without deltas."""

    def __init__(self, *, is_served: bool) -> None:
        """is_served: an engine generates with the blocks of one version while the next version is read. There are then
        two sets of blocks, which are used in turn."""
        self._is_served = is_served
        self._blocks: Blocks = {}
        self._spare: Blocks = {} if is_served else self._blocks
        """Blocks that the next version is written into."""
        self._versions: dict[int, tuple[int, str]] = {}
        """Trainer rank -> version and chain_hash of its part in the blocks."""
        self._next: dict[int, tuple[int, str]] = {}
        """The same for the version that is being read."""

    def holds(self, part: WeightPart) -> bool:
        """Returns True if the blocks have the version and the chain_hash of this part."""
        return self._versions.get(part.rank) == (part.version, part.chain_hash)

    def apply(
        self, steps: Sequence[WeightPart], moves: Sequence[Move], given: Sequence[Sequence[Sequence[Tensor]]]
    ) -> list[Tensor]:
        """Applies a rank's parts, in order. Returns the block of each move.

        steps: the first is whole, or a delta to the part that holds() is true for. given: the fetched pieces of each
        move, by step.
        """
        rank = steps[0].rank
        if not self._is_served:
            self._versions.pop(rank, None)  # if a block cannot be decoded, the blocks are of no version
        for step, pieces_of in zip(steps, given, strict=True):
            shards, decoder = {shard.name: shard for shard in step.shards}, codec_named(step.codec).decoder()
            for move, pieces in zip(moves, pieces_of, strict=True):
                if step is steps[0] and step.base is not None and self._is_served:
                    self._write_block((rank, move), self._blocks[rank, move])
                base = self._spare.get((rank, move))
                made = decoder.decode(shards[move.name], move.box, pieces, base)
                if step.base is None:
                    self._write_block((rank, move), made)
        self._next[rank] = steps[-1].version, steps[-1].chain_hash
        if not self._is_served:
            self.commit()
        return [self._spare[rank, move] for move in moves]

    def _write_block(self, key: tuple[int, Move], block: Tensor) -> None:
        """Copies a block into the memory for the next version."""
        own = self._spare.get(key)
        self._spare[key] = block.cpu().contiguous().clone() if own is None else own.copy_(block)

    def commit(self) -> None:
        """Makes the version that was read last the one that deltas are applied to. Does nothing without deltas."""
        if self._next:
            self._blocks, self._spare = self._spare, self._blocks
            self._versions |= self._next
            self._next = {}

    def discard(self) -> None:
        """Drops the version that was read last, because the engine did not load it."""
        self._next = {}

    def clear(self) -> None:
        self._blocks.clear()
        self._spare.clear()
        self._versions, self._next = {}, {}
