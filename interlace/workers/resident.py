"""Base of workers with one model on their devices."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.core.state_parts import WEIGHTS
from interlace.runtime.worker import Worker, WorkerContext, operation

if TYPE_CHECKING:
    from interlace.models.residence import Residence


class ResidentWorker(Worker):
    """Loads its model's whole state onto the devices, and offloads it."""

    def __init__(self, context: WorkerContext, residence: "Residence") -> None:
        super().__init__(context)
        self._residence = residence

    def onload(self, parts: Sequence[str] | None = None) -> None:
        self._residence.onload(parts)

    def offload(self, parts: Sequence[str] | None = None) -> None:
        self._residence.offload(parts)

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        return {WEIGHTS: self.memory_bytes()}
