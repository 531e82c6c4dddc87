"""Decisions on which the ranks of one engine agree.

Each rank computes the same schedule from the same inputs: requests, weights, noise and logits. Decisions that depend on
anything else, such as time and interrupts, are made by the first rank for all ranks.
"""

import time

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


class Agreement:
    """One rank's access to the shared decisions. Without a mesh, the engine is alone and decides locally."""

    def __init__(self, mesh: "DeviceMesh | None" = None) -> None:
        self._mesh, self._now_s = mesh, 0.0

    def decide(self, flag: bool) -> bool:
        """Returns the first rank's flag. All ranks call this at the same point."""
        return bool(self._draw_first(float(flag))) if self._mesh else flag

    def tick(self) -> None:
        """Receives the first rank's time. All ranks call this at the same point."""
        if self._mesh:
            self._now_s = self._draw_first(time.monotonic())

    def now(self) -> float:
        """Returns the time of the last tick, in seconds; without a mesh, the time of the clock."""
        return self._now_s if self._mesh else time.monotonic()

    def _draw_first(self, number: float) -> float:
        assert self._mesh is not None
        given = torch.tensor([number], dtype=torch.float64)
        distributed.broadcast(given, group=self._mesh.get_group(), group_src=0)
        return float(given)
