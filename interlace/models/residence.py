"""Residence of a model's state: on the device that computes with it, or on the host while others compute there."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Move: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor's copy at another place, or itself where it is there."""


class Residence:
    """Place of one owner's state, part by part, which onload and offload move."""

    def __init__(self, device: torch.device, relocate: Mapping[str, Callable[[Move], None]]) -> None:
        """device: where it is now, and where it computes. relocate: by part, what replaces every tensor of the part by
        its copy; parts that others need come last, so that parts leave in this order and come back in the reverse."""
        self._device, self._relocate = device, relocate
        self._away: set[str] = set()

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the parts, in the order in which they are given up."""
        return (*self._relocate,)

    def is_away(self, part: str) -> bool:
        """Says whether a part is on the host."""
        return part in self._away

    def onload(self, parts: Sequence[str] | None = None) -> None:
        """Moves parts to the device; None: all. On a GPU copies from pinned memory, which operations queue behind."""
        for part in reversed(self._chosen(parts)):
            if part in self._away:
                self._relocate[part](lambda tensor: tensor.to(self._device, non_blocking=True))
                self._away.discard(part)

    def offload(self, parts: Sequence[str] | None = None) -> None:
        """Moves parts to the host, without losing any. Does nothing on a CPU, whose memory is the host's."""
        going = [part for part in self._chosen(parts) if part not in self._away]
        if not going or self._device.type == "cpu":
            return
        for part in going:
            self._relocate[part](lambda tensor: tensor.to("cpu", non_blocking=True))  # torch pins what is copied so
            self._away.add(part)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            # What torch keeps for itself is not there for another process, which computes there next.
            torch.cuda.empty_cache()

    def _chosen(self, parts: Sequence[str] | None) -> list[str]:
        return [part for part in self._relocate if parts is None or part in parts]
