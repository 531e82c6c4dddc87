"""Interface of codecs, which encode shards into tensors to be sent, and decode them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from interlace.core.plugins import find_part
from interlace.weights import codecs
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import ITEM_BYTES, Box, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.weights.saved import SavedForm


class TensorEntry(NamedTuple):
    """Description of a tensor to be sent."""

    dtype: str
    """Name of the dtype in torch."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorEntry:
        """Describes a tensor that is sent as it is."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parcel:
    """Encoded content of one rank for one version, to be sent."""

    entries: Mapping[str, TensorEntry]
    """Name -> type and shape, known before the content exists."""
    tensors: Iterable[Tensor]
    """Content in the order of the entries, as a lazy sequence: each tensor is made after the one before has been sent.
    A tensor may have another dtype than its entry, and be on a device; the receiver of the parcel converts it."""
    codec: str
    base: int | None = None
    """Version that a delta is applied to."""
    shards: Sequence[Shard] = ()
    """Shards of the model's tensors, one for each entry; empty if entries are not blocks of the model's tensors."""
    form: Callable[[], SavedForm] | None = None
    """Maker of the model's form in a transformers folder; None for tensors that are not a model."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the content."""
        return sum(prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in self.entries.values())


class Piece(NamedTuple):
    """A block of a sent tensor."""

    name: str
    box: Box | None
    """The block within the tensor. If None, the whole tensor."""


class PartEncoder(Protocol):
    """Writer side of a codec, kept from version to version."""

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:
        """Encodes shards. tensors: the rank's blocks, in the order of the shards."""


class PartDecoder(Protocol):
    """Reader side of a codec."""

    def pieces(self, shard: Shard, box: Box) -> Sequence[Piece]:
        """Returns the pieces that must be fetched to decode a block of a shard."""

    def decode(self, shard: Shard, box: Box, given: Sequence[Tensor], base: Tensor | None) -> Tensor:
        """Decodes a block. given: fetched pieces. base: the block in the version that a delta is applied to, which is
        changed in place. The result may share memory with the pieces."""


class CodecModule(Protocol):
    """Interface of each codec module in this folder."""

    def encoder(self, config: WeightsConfig) -> PartEncoder:
        """Makes the writer side."""

    def decoder(self) -> PartDecoder:
        """Makes the reader side."""


@cache  # called for each tensor of a version, and each uncached call lists a folder
def codec_named(name: str) -> CodecModule:
    """Returns a built-in codec, or the user's as package.module:Name. Raises UserError for an unknown one."""
    return cast("CodecModule", find_part("codec of weights", codecs, name, ("encoder", "decoder")))
