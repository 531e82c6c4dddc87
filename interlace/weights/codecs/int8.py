"""Codec that rounds to eight bits by channel: each row of a matrix has a scale, its largest absolute value over 127."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from interlace.weights.codecs.base import Parcel, PartDecoder, PartEncoder, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box, Shard

if TYPE_CHECKING:
    from torch import Tensor

SCALE = "#scale"
"""Suffix of a tensor's name, for its scales."""
LARGEST = 127


def is_rounded(shard: Shard) -> bool:
    """Returns True for tensors that are rounded: float matrices, except for exact ones. Others stay unchanged."""
    return len(shard.shape) >= 2 and "float" in shard.dtype and not shard.is_exact


class Int8(PartEncoder, PartDecoder):
    """Both sides. A rank that holds part of a row scales by the largest absolute value of its part."""

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:  # noqa: ARG002
        entries: dict[str, TensorEntry] = {}
        for shard in shards:
            rounded = is_rounded(shard)
            entries[shard.name] = TensorEntry("int8" if rounded else shard.dtype, shard.box.size)
            if rounded:
                entries[shard.name + SCALE] = TensorEntry("float32", (*shard.box.size[:-1], 1))
        return Parcel(entries=entries, tensors=_round_tensors(shards, tensors), codec="int8")

    def pieces(self, shard: Shard, box: Box) -> Sequence[Piece]:
        inner = box.within(shard.box)
        if not is_rounded(shard):
            return [Piece(shard.name, inner)]
        rows = Box((*inner.start[:-1], 0), (*inner.size[:-1], 1))
        return [Piece(shard.name, inner), Piece(shard.name + SCALE, rows)]

    def decode(self, shard: Shard, box: Box, given: Sequence[Tensor], base: Tensor | None) -> Tensor:  # noqa: ARG002
        import torch

        dtype = getattr(torch, shard.dtype)
        return given[0].to(dtype) if len(given) == 1 else (given[0].float() * given[1]).to(dtype)


def _round_tensors(shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    import torch

    for shard, tensor in zip(shards, tensors, strict=True):
        if not is_rounded(shard):
            yield tensor
            continue
        # The served dtype is rounded, not the trainer's: a bfloat16 reader gets the same result from both.
        wide = tensor.to(getattr(torch, shard.dtype)).float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / LARGEST
        yield (wide / scale).round_().to(torch.int8)  # not in place: `wide` may be the trainer's tensor
        yield scale


def encoder(config: WeightsConfig) -> Int8:  # noqa: ARG001 - it has no settings
    """Makes the writer side."""
    return Int8()


decoder = Int8
