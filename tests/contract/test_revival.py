"""Ranks with a process are replaced after the death of one, if their group has a rule for it."""

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from interlace.core.errors import RestartBudgetError, WorkerDiedError
from interlace.core.recovery import RestartBudget
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.local import spawned
from interlace.runtime.rank import Rank
from interlace.runtime.worker import RevivalRule, Worker, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import run_local


class Mortal(Worker):
    """Takes 60 of the 100 bytes of its device."""

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return 60

    @operation(bin="train", collect="all")
    def process(self) -> int:
        return os.getpid()

    @operation(bin="train", collect="all")
    def survive(self, processes: list[int]) -> int:
        """The last of these processes dies, and the others fail because of it. Other processes return their ids."""
        if os.getpid() not in processes:
            return os.getpid()
        if processes[-1] == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([os.pidfd_open(processes[-1])], [], [])
        raise ConnectionResetError("by peer")

    @operation(bin="train", collect="all")
    def outlive(self, processes: list[int]) -> int:
        """The last of these processes dies, and the others continue to compute. Other processes return their ids."""
        if processes[-1] == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        while os.getpid() in processes:
            signal.pause()
        return os.getpid()


class Slow(Mortal):
    """Its ranks offload once a file exists."""

    @operation(bin="train", collect="all")
    def remember(self, file: Path) -> None:
        self._file = file

    def offload(self) -> None:
        while not self._file.exists():
            select.select([], [], [], 0.01)


def run(body: Callable[[Cluster], Awaitable[Any]]) -> Any:
    return run_local(body, Schedule(), 100)


async def launch(
    cluster: Cluster,
    *,
    repeats: bool,
    per_hour: int | None = None,
    name: str = "reward",
    worker: type[Worker] = Mortal,
) -> WorkerGroup[Any]:
    rule = RevivalRule(budget=RestartBudget(name, per_hour), repeats_calls=repeats)
    return await cluster.launch(
        WorkerSpec(
            name=name,
            factory=worker,
            worker_class=worker,
            devices=cluster.devices,
            num_ranks=2,
            preload=(__name__,),
            revival=rule,
        )
    )


def test_an_interrupted_call_is_made_again_by_new_processes() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        before = await group.process()
        after = await group.survive(before)
        assert len({*before, *after}) == 4
        assert await group.process() == after
        assert sorted(process.name for process in cluster.processes) == ["reward[rank 0]", "reward[rank 1]"]

    run(body)


def test_the_restoration_of_new_processes_is_no_stall() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        restored: list[int] = []

        async def restore(ranks: Sequence[Rank]) -> None:
            assert "reward runs restoration after a death" in cluster.waits.graph()
            restored.extend([(await rank.call("process", (), {})).value for rank in ranks])

        assert group.rank_set.revival
        group.rank_set.revival.restore = restore
        assert await group.survive(await group.process()) == restored

    run(body)


def test_the_holder_of_a_group_decides_if_calls_must_not_be_repeated() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=False)
        before = await group.process()
        with pytest.raises(WorkerDiedError, match=r"reward\[rank 1\] died while it ran survive"):
            await group.survive(before)
        await group.revive()
        after = await group.process()
        assert not {*before} & {*after}
        await group.revive()  # no rank has died since
        assert await group.process() == after

    run(body)


def test_an_exhausted_budget_is_an_error_with_the_death() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True, per_hour=0)
        await group.survive(await group.process())

    with pytest.raises(RestartBudgetError, match=r"restarts_per_hour\.reward is 0.*died while it ran survive"):
        run(body)


def test_a_dead_group_gives_its_devices_to_another_and_gets_them_back() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        other = await launch(cluster, repeats=True, name="reference")
        before = await group.process()
        ended = os.pidfd_open(before[0])  # before the end: the pool may remove the process at once
        os.kill(before[0], signal.SIGKILL)
        select.select([ended], [], [])
        assert len(await other.process()) == 2  # does not fit beside the first group, whose state it unloads
        assert cluster.lock.count_loaded_bytes(0) == 60
        assert not {*before} & {*await group.process()}

    run(body)


def test_devices_are_free_only_after_the_peers_of_a_dead_rank_have_offloaded(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True, worker=Slow)
        assert group.rank_set.revival
        processes, file = await group.process(), tmp_path / "may offload"
        await group.remember(file)
        unloading = asyncio.ensure_future(group.state.unload())
        os.kill(processes[-1], signal.SIGKILL)
        while not await group.rank_set.revival.find_death(0.0):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not unloading.done()
        file.touch()
        await unloading

    run(body)


def test_a_call_on_a_rank_that_was_ended_because_its_peer_died_does_not_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spawned, "GRACE_S", 0.2)

    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        before = await group.process()
        assert not {*before} & {*await group.outlive(before)}
        assert cluster.waits.num_running == 0, cluster.waits.graph()  # an open operation hides a stall

    run(body)


def test_a_call_during_a_replacement_waits_for_the_new_processes() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        interrupted = asyncio.ensure_future(group.survive(await group.process()))
        while cluster.processes and not interrupted.done():  # new ones may start between two looks
            await asyncio.sleep(0.001)
        assert await group.memory_bytes() == 60
        assert len(await interrupted) == 2

    run(body)


def test_a_group_that_was_ended_leaves_no_process_in_the_cluster() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, repeats=True)
        await cluster.dismiss(group)
        assert not cluster.processes

    run(body)
