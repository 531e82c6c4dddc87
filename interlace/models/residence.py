"""Residence of a model's state: on the device that computes with it, or on the host while others compute there."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Move: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor's copy at another place, or itself where it is there."""


class Residence:
    """Place of one owner's state, which onload and offload move."""

    def __init__(self, device: torch.device, relocate: Callable[[Move], None]) -> None:
        """device: where it is now, and where it computes. relocate: replaces every tensor of the state by its copy."""
        self._device, self._relocate = device, relocate
        self.is_away = False
        """Flag: the state is on the host."""

    def onload(self) -> None:
        """Moves the state to the device."""
        if self.is_away:
            self._relocate(lambda tensor: tensor.to(self._device))
            self.is_away = False

    def offload(self) -> None:
        """Moves the state to the host, without losing any. Does nothing on a CPU, whose memory is the host's."""
        if self.is_away or self._device.type == "cpu":
            return
        self._relocate(lambda tensor: tensor.to("cpu"))
        self.is_away = True
        # What torch keeps for itself is not there for another process, which computes there next.
        torch.cuda.empty_cache()
