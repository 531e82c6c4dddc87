"""Placement of a model's state on its device, or on the host while other models use the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Move: TypeAlias = Callable[[Tensor], Tensor]
"""Function that returns a tensor's copy at another place, or the tensor itself if it is already at that place."""


def make_current(device: str) -> None:
    """Makes a GPU the current device of this thread. Kernels of Triton and NCCL run there, not where their tensors are.

    device: name in torch; a CPU has no current device.
    """
    if torch.device(device).index is not None and device.startswith("cuda"):
        torch.cuda.set_device(device)


class Residence:
    """Current place of each part of a model's state; onload and offload move the parts."""

    def __init__(self, device: torch.device, relocate: Mapping[str, Callable[[Move], None]]) -> None:
        """device: the device that computes, on which the state lies at first.

        relocate: by part, a function that replaces every tensor of the part by its copy. Parts that others depend on
        come last, so that offload moves them last and onload moves them first.
        """
        self._device, self._relocate = device, relocate
        self._away: set[str] = set()

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the parts in the order of offload."""
        return (*self._relocate,)

    def is_away(self, part: str) -> bool:
        """Returns True if a part is on the host."""
        return part in self._away

    def onload(self, parts: Sequence[str] | None = None) -> None:
        """Moves parts to the device; if None, all parts. On a GPU the copies come from pinned memory and are
        asynchronous: later operations on the stream wait for them.
        """
        for part in reversed(self._choose_parts(parts)):
            if part in self._away:
                self._relocate[part](lambda tensor: tensor.to(self._device, non_blocking=True))
                self._away.discard(part)

    def offload(self, parts: Sequence[str] | None = None) -> None:
        """Moves parts to the host. Does nothing on a CPU, whose memory is the host's."""
        going = [part for part in self._choose_parts(parts) if part not in self._away]
        if not going or self._device.type == "cpu":
            return
        for part in going:
            # torch pins the memory of such copies.
            self._relocate[part](lambda tensor: tensor.to("cpu", non_blocking=True))
            self._away.add(part)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            # Free torch's cached memory for another process, which computes on this device next.
            torch.cuda.empty_cache()

    def _choose_parts(self, parts: Sequence[str] | None) -> list[str]:
        return [part for part in self._relocate if parts is None or part in parts]
