"""Transport in the message itself. On Ray, the object store holds large tables and copies them to each node once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from interlace.weights.codecs.base import Parcel, Piece
from interlace.weights.config import WeightsConfig
from interlace.weights.content import content_hash, own_tensors
from interlace.weights.ref import WeightPart
from interlace.weights.transports.base import Held, Lease, Receiver, Sender, Sent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MessageSource:
    """A table of tensors, which the cluster back end may put into a store that both sides can read."""

    tensors_within: ClassVar = ("tensors",)
    tensors: Mapping[str, Tensor]


class MessageEnds(Sender, Receiver):
    """Both sides. The store keeps its content, read-only, as long as a version is referenced."""

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002
        tensors = {name: tensor.cpu() for name, tensor in own_tensors(parcel, copy=copy)}
        # If no message leaves the process, tensors that were not copied are still the trainer's memory.
        return Sent(source=MessageSource(tensors=tensors), checksum=content_hash(tensors.values()), frozen=copy)

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        assert isinstance(part.source, MessageSource)
        return Held.cut(part.source.tensors, pieces)


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> MessageEnds:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return MessageEnds()


receiver = MessageEnds
