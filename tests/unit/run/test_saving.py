"""A checkpoint is written during the run, one at a time, and is valid once it is complete."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from interlace.core.errors import InterlaceError, RemoteError
from interlace.data.stream import StreamState
from interlace.flows.run import RoleGroups
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity
from interlace.run.saving import MemoryCheckpoints, Saver
from interlace.run.state import RunState
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import run_local


class Model(Worker):
    """A number that training raises; writing it waits until the disk is let go."""

    def __init__(self, context: WorkerContext, disk: threading.Event) -> None:
        super().__init__(context)
        self._disk, self._value, self._copies = disk, 0, [0]

    @operation(bin="train")
    def train(self) -> int:
        self._value += 1
        return self._value

    @operation(bin="idle")
    def copy_checkpoint(self) -> None:
        self._copies.append(self._value)

    @operation(on_device=False)
    async def write_checkpoint(self, folder: Path) -> None:
        value = self._copies.pop()
        await asyncio.to_thread(self._disk.wait)
        if value < 0:
            raise ValueError("a disk that breaks")
        (folder / "value").write_text(str(value))

    @operation(on_device=False)
    def checkpoint_bytes(self) -> int:
        return 1

    @operation(bin="idle")
    def breaks(self) -> None:
        self._value = -1


def state(step: int) -> RunState:
    return RunState(done_steps=step, num_groups=0, stream=StreamState(fingerprint=0), before=None)


def run(
    tmp_path: Path, body: Callable[[Cluster, Any, Saver, threading.Event], Awaitable[None]], memory_every: int = 0
) -> Checkpoints:
    disk, checkpoints = threading.Event(), Checkpoints(tmp_path, keep=2)

    async def main(cluster: Cluster) -> None:
        spec = WorkerSpec(name="actor", factory=lambda context: Model(context, disk), worker_class=Model)
        group = await cluster.launch(spec)
        groups = RoleGroups(rollout=[], reward=group, actor=group)
        memory = MemoryCheckpoints(memory_every, RunIdentity(run="0", model="tiny"))
        saver = Saver(cluster, checkpoints, groups, RunFolder.create(tmp_path, "run"), every=2, memory=memory)
        try:
            await body(cluster, group, saver, disk)
        finally:
            disk.set()
            memory.close()

    run_local(main, Schedule(), 100)
    return checkpoints


def value(checkpoints: Checkpoints, step: int) -> int:
    return int((checkpoints.latest().parent / f"step_{step}" / "value").read_text())  # type: ignore[union-attr]


def test_a_replaced_run_that_cannot_be_deleted_does_not_end_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        replaced = RunFolder.named(tmp_path, "run").replaced
        replaced.mkdir()
        notes: list[str] = []
        cluster.notes.follow(notes.append)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            await saver.delete_replaced()
        assert len(notes) == 1 and f"Delete {replaced} yourself" in notes[0]
        await saver.delete_replaced()
        assert not replaced.exists()

    run(tmp_path, body)


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        await group.train()
        await saver.copy()
        saver.write(state(1), saver.checkpoints)
        assert await group.train() == 2
        assert Checkpoints(tmp_path, keep=2).steps() == [], "it is not whole yet"
        disk.set()
        await saver.finish()

    checkpoints = run(tmp_path, body)
    assert checkpoints.steps() == [1] and value(checkpoints, 1) == 1


def test_the_next_copy_waits_for_the_disk_and_the_run_s_end_for_both(tmp_path: Path) -> None:
    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        await saver.copy()
        saver.write(state(1), saver.checkpoints)
        second = asyncio.ensure_future(saver.copy())
        assert await group.train() == 1 and not second.done()
        disk.set()
        assert await second >= 0
        saver.write(state(2), saver.checkpoints)
        await saver.save(state(2))

    checkpoints = run(tmp_path, body)
    assert checkpoints.steps() == [1, 2]
    assert [value(checkpoints, step) for step in (1, 2)] == [0, 1]


def test_a_step_that_is_written_is_not_written_again(tmp_path: Path) -> None:
    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        disk.set()
        await group.train()
        await saver.save(state(1))
        await group.train()
        await saver.save(state(1))

    assert value(run(tmp_path, body), 1) == 1


def test_a_disk_that_breaks_ends_the_run(tmp_path: Path) -> None:
    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        await group.breaks()
        await saver.copy()
        saver.write(state(1), saver.checkpoints)
        disk.set()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InterlaceError, match="a disk that breaks") as caught:
        run(tmp_path, body)
    assert isinstance(caught.value, RemoteError)
    assert Checkpoints(tmp_path, keep=2).steps() == []


def test_steps_without_a_checkpoint_on_disk_are_written_into_memory(tmp_path: Path) -> None:
    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        disk.set()
        memory = saver.find_due(1, is_best=False)
        assert memory and memory is not saver.checkpoints
        assert saver.find_due(1, is_best=True) is saver.find_due(2, is_best=False) is saver.checkpoints
        await group.train()
        await saver.copy()
        saver.write(state(1), memory)
        await saver.save(state(1))
        assert memory.steps() == [1]

    checkpoints = run(tmp_path, body, memory_every=1)
    assert checkpoints.steps() == [1] and value(checkpoints, 1) == 1, "the end of the run is on disk"


def test_a_full_memory_ends_the_checkpoints_there_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    async def body(cluster: Cluster, group: Any, saver: Saver, disk: threading.Event) -> None:
        disk.set()
        cluster.notes.follow(notes.append)
        memory = saver.find_due(1, is_best=False)
        assert memory
        monkeypatch.setattr(Model, "checkpoint_bytes", operation(on_device=False)(lambda self: 1 << 60))
        await saver.copy()
        saver.write(state(1), memory)
        await saver.finish()
        assert memory.steps() == [] and saver.find_due(3, is_best=False) is None

    run(tmp_path, body, memory_every=1)
    assert len(notes) == 1 and notes[0].startswith(
        "no further checkpoints in memory (recovery.memory_checkpoint_every): no space"
    )
