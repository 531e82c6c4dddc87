"""Codec that sends the served bits unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from interlace.weights.codecs.base import Parcel, PartDecoder, PartEncoder, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box, Shard

if TYPE_CHECKING:
    from torch import Tensor


class Raw(PartEncoder, PartDecoder):
    """Both sides. A shard is only converted to the served dtype."""

    name = "raw"

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:  # noqa: ARG002
        entries = {shard.name: TensorEntry(shard.dtype, shard.box.size) for shard in shards}
        return Parcel(entries=entries, tensors=tensors, codec=self.name, shards=shards)

    def pieces(self, shard: Shard, box: Box) -> Sequence[Piece]:
        return [Piece(shard.name, None if box == shard.box else box.within(shard.box))]

    def decode(self, shard: Shard, box: Box, given: Sequence[Tensor], base: Tensor | None) -> Tensor:  # noqa: ARG002
        import torch

        return given[0].to(getattr(torch, shard.dtype))


def encoder(config: WeightsConfig) -> Raw:  # noqa: ARG001 - it has no settings
    """Makes the writer side."""
    return Raw()


decoder = Raw
