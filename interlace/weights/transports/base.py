"""A transport: how a rank's content gets from the process that made it to those that need some of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from interlace.core.plugins import find_part
from interlace.weights import transports
from interlace.weights.codecs.base import Parcel, Piece
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import WeightPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sent:
    """Outcome of sending a parcel."""

    source: object
    """Address of its content; goes through the controller to the receivers."""
    checksum: str
    frozen: bool = True
    """False where the content is the memory that was given."""


class Sender(Protocol):
    """A trainer rank's end."""

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:
        """Makes a parcel ready to be received. copy: what was given may change afterwards, and the content must not."""
        ...

    def keep(self, versions: Collection[int]) -> None:
        """Lets go of the content of all versions but these."""
        ...

    def close(self) -> None: ...


class Lease(Protocol):
    """Pieces that were received, good until the lease is closed."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Returns the pieces, in the order in which they were asked for."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine rank's end."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        """Receives pieces of a part, all of them or none. Raises InterlaceError where the content is not to be had."""
        ...

    def close(self) -> None: ...


class TransportModule(Protocol):
    """Interface of each module of this folder."""

    def sender(self, config: WeightsConfig, *, rank: int, num_ranks: int) -> Sender:
        """Makes a trainer rank's end."""
        ...

    def receiver(self) -> Receiver:
        """Makes an engine rank's end."""
        ...


class Held:
    """A lease on memory that outlives it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def close(self) -> None:
        """Forgets the pieces."""
        self.tensors = ()


@cache  # asked for each tensor of a version, and each time it looks through a folder
def transport_named(name: str) -> TransportModule:
    """Returns a built-in transport, or the user's as package.module:Name. Raises UserError for an unknown one."""
    return cast("TransportModule", find_part("transport of weights", transports, name, ("sender", "receiver")))
