"""A worker around one model."""

from typing import TYPE_CHECKING

from interlace.runtime.worker import Worker, WorkerContext

if TYPE_CHECKING:
    from interlace.models.residence import Residence


class ResidentWorker(Worker):
    """Its model's whole state is loaded onto the devices, and off them."""

    def __init__(self, context: WorkerContext, residence: "Residence") -> None:
        super().__init__(context)
        self._residence = residence

    def onload(self) -> None:
        self._residence.onload()

    def offload(self) -> None:
        self._residence.offload()
