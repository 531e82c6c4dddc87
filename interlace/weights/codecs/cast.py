"""Codec that rounds floats to bfloat16; the reader converts them back to the served dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.weights.codecs.base import Parcel, TensorEntry
from interlace.weights.codecs.raw import Raw
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Shard

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDED, _NARROW = ("float32", "float64"), ("bfloat16", "float16")


class Cast(Raw):
    """Needs half the bytes of float32, with eight bits of its mantissa."""

    name = "cast"

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:
        """Rounds wider floats. If other tensors are served in 16 bits, the wider ones are those that a model keeps in
        float32, such as a router's bias: rounding them would save nothing and change the engine's choices.
        """
        parcel = super().encode(version, shards, tensors)
        if any(shard.dtype in _NARROW for shard in shards):
            return parcel
        entries = {
            name: TensorEntry("bfloat16" if entry.dtype in _ROUNDED else entry.dtype, entry.shape)
            for name, entry in parcel.entries.items()
        }
        return replace(parcel, entries=entries)


def encoder(config: WeightsConfig) -> Cast:  # noqa: ARG001 - it has no settings
    """Makes the writer side."""
    return Cast()


decoder = Cast
