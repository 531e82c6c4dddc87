"""Interface of transports, which bring a rank's content from its process to the processes that need parts of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from interlace.core.plugins import find_part
from interlace.weights import transports
from interlace.weights.codecs.base import Parcel, Piece
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box
from interlace.weights.ref import WeightPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sent:
    """Result of sending a parcel."""

    source: object
    """Address of the content; the controller passes it on to the receivers."""
    checksum: str
    frozen: bool = True
    """False if the content is the memory of the parcel's tensors."""


class Sender(Protocol):
    """A trainer rank's side."""

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:
        """Makes a parcel available to receivers. copy: the given tensors may change later, and the content must not."""

    def keep(self, versions: Collection[int]) -> None:
        """Frees the content of all versions but these. Does nothing if versions end by themselves."""
        del versions

    def close(self) -> None:
        """Ends the transport. Does nothing if it holds neither memory nor connections."""
        return


class Lease(Protocol):
    """Received pieces, valid until the lease is closed."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Returns the pieces, in the requested order."""

    @property
    def borrows(self) -> bool:
        """Returns True if the sender reuses the memory of the pieces after close(); False if the tensors keep it."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine rank's side."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        """Receives pieces of a part, all of them or none. Raises InterlaceError if the content cannot be received."""

    def close(self) -> None:
        """Ends the transport. Does nothing if it holds neither memory nor connections."""
        return


class TransportModule(Protocol):
    """Interface of each transport module in this folder."""

    def sender(self, config: WeightsConfig, *, rank: int, num_ranks: int) -> Sender:
        """Makes a trainer rank's side."""

    def receiver(self) -> Receiver:
        """Makes an engine rank's side."""


def cut_out(tensor: Tensor, box: Box | None) -> Tensor:
    """Returns a block of a tensor, as a view; the tensor itself if box is None."""
    return tensor if box is None else tensor[box.slices]


class Held:
    """A lease on memory that lives as long as a tensor uses it, also after the end of the lease."""

    borrows = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def cut(cls, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Held:
        """Holds pieces of named tensors, as views."""
        return cls([cut_out(tensors[name], box) for name, box in pieces])

    def close(self) -> None:
        """Drops the references to the pieces."""
        self.tensors = ()


@cache  # called for each tensor of a version, and each uncached call lists a folder
def transport_named(name: str) -> TransportModule:
    """Returns a built-in transport, or the user's as package.module:Name. Raises UserError for an unknown one."""
    return cast("TransportModule", find_part("transport of weights", transports, name, ("sender", "receiver")))
