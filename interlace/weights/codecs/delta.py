"""Codec for the changes since the previous version: positions and new values, bit-exact in the served dtype.

At the small learning rates of reinforcement learning, most weights round to the same bfloat16 after a step (PULSE,
arXiv 2602.03839). A position is encoded as its distance from the previous one, in 16 bits; if the distance is larger,
unchanged values are inserted in between. A version for which this saves too little is sent whole, and so is one version
in `full_every`, from which a late reader starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import InterlaceError
from interlace.weights.codecs.base import Parcel, PartDecoder, PartEncoder, Piece, TensorEntry
from interlace.weights.codecs.raw import Raw
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box, Shard

if TYPE_CHECKING:
    from torch import Tensor

GAPS, VALUES = "#gaps", "#values"
"""Suffixes of a tensor's name, for its positions and its new values."""
_LARGEST_GAP = 65535
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class DeltaEncoder(PartEncoder):
    """Writer side. Keeps the previous version on the host, in the served dtype."""

    def __init__(self, config: WeightsConfig) -> None:
        self._full_every, self._densest = config.full_every, config.densest
        self._kept: dict[str, Tensor] = {}
        self._version: int | None = None
        self._num_since_full = 0

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:
        base, due = self._version, self._num_since_full + 1 >= self._full_every
        found = self._collect_changes(shards, tensors, wanted=base is not None and not due)
        self._version = version
        whole = sum(tensor.nbytes for tensor in self._kept.values())
        if found is None or sum(part.nbytes for _, part in found) > self._densest * whole:
            self._num_since_full = 0
            return Raw().encode(version, shards, [self._kept[shard.name].clone() for shard in shards])
        self._num_since_full += 1
        entries = {name: TensorEntry.of(part) for name, part in found}
        return Parcel(entries=entries, tensors=[part for _, part in found], codec="delta", base=base)

    def _collect_changes(
        self, shards: Sequence[Shard], tensors: Iterable[Tensor], *, wanted: bool
    ) -> list[tuple[str, Tensor]] | None:
        """Updates the kept version. Returns the changes if wanted and if every tensor has a previous version."""
        import torch

        found: list[tuple[str, Tensor]] = []
        for shard, tensor in zip(shards, tensors, strict=True):
            new = tensor.detach().to("cpu", getattr(torch, shard.dtype)).contiguous()
            old = self._kept.get(shard.name)
            if old is None or old.shape != new.shape or old.dtype != new.dtype:
                self._kept[shard.name], wanted = new.clone(), False
                continue
            if wanted:
                gaps, values = _find_changes(bits_of(old), bits_of(new))
                found.append((shard.name + GAPS, torch.from_numpy(gaps)))
                found.append((shard.name + VALUES, torch.from_numpy(values.view(np.uint8))))
            old.copy_(new)
        return found if wanted else None


class DeltaDecoder(PartDecoder):
    """Reader side."""

    def pieces(self, shard: Shard, box: Box) -> Sequence[Piece]:  # noqa: ARG002 - changes of a shard come whole
        return [Piece(shard.name + GAPS, None), Piece(shard.name + VALUES, None)]

    def decode(self, shard: Shard, box: Box, given: Sequence[Tensor], base: Tensor | None) -> Tensor:
        """Changes the base in place."""
        if base is None:
            raise InterlaceError(f"weights: a delta of {shard.name} without the version that it is applied to.")
        held = bits_of(base)
        positions = np.cumsum(given[0].numpy(), dtype=np.int64) - 1
        values = given[1].numpy().view(held.dtype)
        if box != shard.box:
            inside, positions = _select_positions(positions, shard.box, box)
            values = values[inside]
        held[positions] = values
        return base


def bits_of(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """Returns the bits of a contiguous host tensor as a flat array that shares its memory."""
    import torch

    if not tensor.numel():
        return np.empty(0, _BITS[tensor.element_size()])
    return tensor.reshape(-1).view(torch.uint8).numpy().view(_BITS[tensor.element_size()])


def _find_changes(
    old: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger]
) -> tuple[NDArray[np.uint16], NDArray[np.unsignedinteger]]:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1)
    if len(gaps) and gaps.max() > _LARGEST_GAP:
        extra = (gaps - 1) // _LARGEST_GAP
        before = np.repeat(positions - gaps, extra)
        number = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra) + 1
        positions = np.sort(np.concatenate([positions, before + number * _LARGEST_GAP]))
        gaps = np.diff(positions, prepend=-1)
    return gaps.astype(np.uint16), new[positions]


def _select_positions(
    positions: NDArray[np.int64], outer: Box, box: Box
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Returns a mask of the positions of a shard that lie in a block of it, and those positions within the block."""
    inner = box.within(outer)
    places = np.unravel_index(positions, outer.size)
    inside = np.ones(len(positions), np.bool_)
    for place, first, length in zip(places, inner.start, inner.size, strict=True):
        inside &= (place >= first) & (place < first + length)
    own = [place[inside] - first for place, first in zip(places, inner.start, strict=True)]
    return inside, np.ravel_multi_index(own, box.size)


encoder = DeltaEncoder
decoder = DeltaDecoder
