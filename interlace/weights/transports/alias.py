"""Transport within one process: the tensors themselves, or copies if training continues before engines load them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from interlace.core.errors import InterlaceError
from interlace.weights.codecs.base import Parcel, Piece
from interlace.weights.config import WeightsConfig
from interlace.weights.content import ContentHash, own_tensors
from interlace.weights.ref import WeightPart
from interlace.weights.transports.base import Held, Lease, Receiver, Sender, Sent

SAMPLE, SAMPLE_OF = 1 << 10, 1 << 14
"""Elements that are hashed: the first SAMPLE of each block of SAMPLE_OF. Nothing is sent that could be damaged, so the
hash must only detect whether an update changed the weights."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AliasSource:
    """Tensors in the memory of this process."""

    tensors: Mapping[str, Tensor]

    def __reduce__(self) -> str:
        raise InterlaceError(
            "weights.transport = 'alias' hands tensors over within one process, and an engine is in another. Leave "
            "weights.transport out, or set it to shared_memory."
        )


class AliasEnds(Sender, Receiver):
    """Both sides. The content lives as long as its source."""

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002
        tensors = dict(own_tensors(parcel, copy=copy))
        found = ContentHash()
        for tensor in tensors.values():
            flat = tensor.reshape(-1)
            whole = flat.numel() // SAMPLE_OF * SAMPLE_OF
            found.update(flat[:whole].view(-1, SAMPLE_OF)[:, :SAMPLE] if whole else flat)
            found.update(flat[whole : whole + SAMPLE])
        return Sent(source=AliasSource(tensors=tensors), checksum=str(found), frozen=copy)

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        assert isinstance(part.source, AliasSource)
        return Held.cut(part.source.tensors, pieces)


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> AliasEnds:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return AliasEnds()


receiver = AliasEnds
