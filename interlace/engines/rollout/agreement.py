"""Decisions that the ranks of one engine take alike. Each schedules the same, since what it schedules by is the same:
requests, weights, noise and logits. What is not, such as time and interrupts, the first rank decides for all.
"""

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Agreement:
    """One rank's view of the decisions. Without a mesh the engine is alone, and decides at once."""

    def __init__(self, mesh: "DeviceMesh | None" = None) -> None:
        self._mesh, self._now_s = mesh, 0.0

    def decide(self, flag: bool) -> bool:
        """Returns the first rank's flag. All ranks call this at the same point."""
        return bool(self._first(float(flag))) if self._mesh else flag

    def tick(self) -> None:
        """Takes the first rank's time over. All ranks call this at the same point."""
        if self._mesh:
            self._now_s = self._first(time.monotonic())

    def now(self) -> float:
        """Returns the seconds of the last tick; of an engine alone, those of the clock."""
        return self._now_s if self._mesh else time.monotonic()

    def _first(self, number: float) -> float:
        from torch import distributed

        assert self._mesh is not None
        given = torch.tensor([number], dtype=torch.float64)
        distributed.broadcast(given, group=self._mesh.get_group(), group_src=0)
        return float(given)
