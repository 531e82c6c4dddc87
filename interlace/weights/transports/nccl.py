"""Point-to-point transport between devices, like gloo between hosts. Not run here: it needs GPUs.

Each pair of a trainer rank and an engine rank has a communicator of two. NCCL does not allow two ranks of a group on
one GPU: colocated engines use cuda_ipc.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interlace.weights.config import WeightsConfig
from interlace.weights.transports.gloo import Pair, PeerReceiver, PeerSender

if TYPE_CHECKING:
    from interlace.weights.meeting import Meeting


class NcclPair(Pair):
    """A group of one trainer rank (0) and one engine rank (1), each on the current device of its thread."""

    backend = "nccl"

    def __init__(self, meeting: Meeting, rank: int, patience_s: float) -> None:
        from torch import distributed

        made: Any = distributed.ProcessGroupNCCL
        options = made.Options()
        options._timeout = timedelta(seconds=patience_s)
        self._group, self._other = made(meeting, rank, 2, options), 1 - rank
        self._device = torch.device("cuda", torch.cuda.current_device())

    def send(self, tensor: Tensor) -> Any:
        """Starts to send a contiguous tensor. Returns the work to wait for."""
        return self._group.send([tensor.to(self._device)], self._other, 0)

    def receive(self, tensor: Tensor) -> None:
        """Receives into a contiguous tensor; into a host tensor by way of the device."""
        if tensor.numel():
            there = tensor if tensor.is_cuda else torch.empty_like(tensor, device=self._device)
            self._group.recv([there], self._other, 0).wait()
            if there is not tensor:
                tensor.copy_(there)


class NcclSender(PeerSender):
    """A trainer rank's side. Versions are kept on its device."""

    pair = NcclPair

    def __init__(self, config: WeightsConfig) -> None:
        """Sends from the current device of the calling thread."""
        self._device = torch.cuda.current_device()
        super().__init__(config)

    def _serve_engine(self, connection: socket.socket) -> None:
        torch.cuda.set_device(self._device)  # a new thread begins on the first GPU
        super()._serve_engine(connection)

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        return tensor


class NcclReceiver(PeerReceiver):
    """An engine rank's side."""

    pair = NcclPair


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> NcclSender:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return NcclSender(config)


receiver = NcclReceiver
