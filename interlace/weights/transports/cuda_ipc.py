"""Transport for processes that share a GPU: engines map the trainer's copy in GPU memory. It needs a GPU.

The trainer's copy of a version stays until two newer ones exist: by then no engine loads it any more.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.weights.codecs.base import Parcel, Piece
from interlace.weights.config import WeightsConfig
from interlace.weights.content import hash_on_device, own_tensors
from interlace.weights.ref import WeightPart
from interlace.weights.transports.base import Held, Lease, Receiver, Sender, Sent

KEPT = 2
"""Versions kept on the device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IpcSource:
    """Handles of a GPU's memory."""

    handles: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
    """Name -> function that opens a tensor in another process, and its arguments."""


class IpcSender(Sender):
    """A trainer rank's side. The last KEPT versions stay."""

    def __init__(self) -> None:
        self._kept: deque[dict[str, Tensor]] = deque(maxlen=KEPT)

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002 - it is always one
        from torch.multiprocessing.reductions import reduce_tensor

        held = dict(own_tensors(parcel, copy=True))
        checksum = hash_on_device(held.values())
        torch.cuda.synchronize()
        self._kept.append(held)
        return Sent(source=IpcSource(handles={n: reduce_tensor(t) for n, t in held.items()}), checksum=checksum)

    def close(self) -> None:
        """Frees the device memory."""
        self._kept.clear()


class IpcReceiver(Receiver):
    """An engine rank's side."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        assert isinstance(part.source, IpcSource)
        opened = {name: rebuild(*arguments) for name, (rebuild, arguments) in part.source.handles.items()}
        return Held.cut(opened, pieces)


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> IpcSender:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return IpcSender()


receiver = IpcReceiver
