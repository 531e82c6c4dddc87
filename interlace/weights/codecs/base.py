"""A codec: shards into the tensors that travel, and back."""

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
    """A tensor that travels."""

    dtype: str
    """Type as torch names it."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parcel:
    """One rank's content of a version, on its way."""

    entries: Mapping[str, TensorEntry]
    """Name -> type and shape, known before any content."""
    tensors: Iterable[Tensor]
    """Content in the order of the entries, one after another: the next is made once the last is on its way. It may be
    of another type, and on a device: who takes it writes it as the entry says."""
    codec: str
    base: int | None = None
    """Version that it is applied to."""
    shards: Sequence[Shard] = ()
    """The model's tensors that the entries are blocks of, one an entry; empty where entries are something else."""
    form: Callable[[], SavedForm] | None = None
    """Maker of how transformers writes the model's folder; None for tensors that are no model."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the content."""
        return sum(prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in self.entries.values())


class Piece(NamedTuple):
    """A block of a tensor that travels."""

    name: str
    box: Box | None
    """None: the whole tensor."""


class PartEncoder(Protocol):
    """The writer's end, kept from version to version."""

    def encode(self, version: int, shards: Sequence[Shard], tensors: Iterable[Tensor]) -> Parcel:
        """Writes shards down. tensors: the rank's own blocks, in the shards' order."""
        ...


class PartDecoder(Protocol):
    """The reader's end."""

    def pieces(self, shard: Shard, box: Box) -> Sequence[Piece]:
        """Names what has to be fetched to make a block of a shard."""
        ...

    def decode(self, shard: Shard, box: Box, given: Sequence[Tensor], base: Tensor | None) -> Tensor:
        """Makes the block. given: the pieces. base: the block in the version that a delta is applied to, changed in
        place. The result may share memory with what was given."""
        ...


class CodecModule(Protocol):
    """Interface of each module of this folder."""

    def encoder(self, config: WeightsConfig) -> PartEncoder:
        """Makes the writer's end."""
        ...

    def decoder(self) -> PartDecoder:
        """Makes the reader's end."""
        ...


@cache  # asked for each tensor of a version, and each time it looks through a folder
def codec_named(name: str) -> CodecModule:
    """Returns a built-in codec, or the user's as package.module:Name. Raises UserError for an unknown one."""
    return cast("CodecModule", find_part("codec of weights", codecs, name, ("encoder", "decoder")))
