"""Point to point between devices, as gloo between hosts. Not run here: it needs GPUs.

Each pair of ends has a communicator of two. NCCL takes no two ranks of a group on one GPU: colocated engines have
cuda_ipc.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interlace.weights.config import WeightsConfig
from interlace.weights.transports.gloo import Pair, PeerReceiver, PeerSender

if TYPE_CHECKING:
    from interlace.weights.meeting import Meeting


class NcclPair(Pair):
    """A group of one trainer rank (0) and one engine rank (1), each on the device that is current in its process."""

    backend = "nccl"

    def __init__(self, meeting: Meeting, rank: int, patience_s: float) -> None:
        from torch import distributed

        made: Any = distributed.ProcessGroupNCCL
        options = made.Options()
        options._timeout = timedelta(seconds=patience_s)
        self._group, self._other = made(meeting, rank, 2, options), 1 - rank
        self._device = torch.device("cuda", torch.cuda.current_device())

    def send(self, tensor: Tensor) -> Any:
        """Begins to send a contiguous tensor. Returns what to wait for."""
        return self._group.send([tensor.to(self._device)], self._other, 0)

    def receive(self, tensor: Tensor) -> None:
        """Fills a contiguous tensor; one on the host by way of the device."""
        if tensor.numel():
            there = tensor if tensor.is_cuda else torch.empty_like(tensor, device=self._device)
            self._group.recv([there], self._other, 0).wait()
            if there is not tensor:
                tensor.copy_(there)


class NcclSender(PeerSender):
    """A trainer rank's end: versions are kept on its device."""

    pair = NcclPair

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor


class NcclReceiver(PeerReceiver):
    """An engine rank's end."""

    pair = NcclPair


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> NcclSender:  # noqa: ARG001
    """Makes a trainer rank's end."""
    return NcclSender(config)


def receiver() -> NcclReceiver:
    """Makes an engine rank's end."""
    return NcclReceiver()
