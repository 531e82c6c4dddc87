"""The blocks that a reader applies deltas to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from interlace.weights.codecs.base import codec_named
from interlace.weights.plan import Move
from interlace.weights.ref import WeightPart

if TYPE_CHECKING:
    from torch import Tensor

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
        """Drops all blocks."""
        self._blocks.clear()
        self._spare.clear()
        self._versions, self._next = {}, {}
