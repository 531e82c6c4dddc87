"""Parts of a worker's state are loaded and unloaded separately, on every cluster."""

import pytest

from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import CLUSTERS
from tests.contract.workers import Recorder, Trainer


@pytest.mark.parametrize("kind", ["local", "sim"])
def test_parts_of_a_state_come_as_operations_need_them_and_go_in_their_order(kind: str) -> None:
    """The trainer's state and what it makes while it computes are more than the device has; an update needs no room
    for activations, and they none for moments."""

    async def body(cluster: Cluster) -> None:
        spec = {"name": "trainer", "factory": Trainer, "worker_class": Trainer, "working_bytes": 50}
        trainer = await cluster.launch(WorkerSpec(**spec, devices=cluster.devices[:1]))  # type: ignore[arg-type]
        other = await cluster.start("other", Recorder, 50, on="0")
        async with trainer.hold("train"):
            await trainer.accumulate()
            await trainer.update()
            await trainer.accumulate()
        assert cluster.lock.list_loaded_parts(0) == {"trainer": {"gradients": 20, "weights": 20}}
        await trainer.update()
        await other.work("x")
        assert cluster.lock.list_loaded_parts(0) == {"trainer": {"weights": 20}, "other": {"state": 50}}
        await trainer.export()
        assert await other.history() == ["onload", "x"]
        await trainer.accumulate()
        assert cluster.lock.list_loaded_parts(0) == {"trainer": {"gradients": 20, "weights": 20}}
        came = [
            "+gradients weights",
            "accumulate",
            "+moments",
            "update",
            "-moments",
            "accumulate",
            "+moments",
            "update",
        ]
        gone = ["-gradients", "-moments", "export", "+gradients", "accumulate"]
        assert await trainer.history() == [*came, *gone]

    CLUSTERS[kind](body, Schedule(), 100)
