"""Several ranks on this machine are processes, with guarantees beyond the contract."""

import asyncio
import errno
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from interlace.core.errors import InterlaceError, UserError, WorkerAbsentError, WorkerDiedError
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.process import server
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import WeightRef
from tests.contract.clusters import run_local, two_devices
from tests.contract.ray_workers import Engine, HeapCounter, Mate, PidTracer, Resident, Trainer


def run(body: Callable[[Cluster], Awaitable[Any]]) -> Any:
    return run_local(body, Schedule(), 100)


async def launch(cluster: Cluster, worker: Callable[[WorkerContext], Worker], ranks: int = 2) -> WorkerGroup[Any]:
    worker_class = worker if isinstance(worker, type) else Resident
    return await cluster.launch(
        WorkerSpec(
            name="actor", factory=worker, worker_class=worker_class, devices=cluster.devices[:ranks], num_ranks=ranks
        )
    )


def test_the_garbage_collector_leaves_out_what_a_worker_was_made_of() -> None:
    async def body(cluster: Cluster) -> list[int]:
        group = await launch(cluster, HeapCounter)
        found: list[int] = await group.count_frozen()
        return found

    assert min(run(body)) > 1000


def is_gone(process: int) -> bool:
    """They are this process's own children, and were waited for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_that_the_system_refuses_is_not_blamed_on_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def body(cluster: Cluster) -> None:
        monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)
        with pytest.raises(WorkerAbsentError, match=r"could not be started: .*Resource temporarily unavailable"):
            await launch(cluster, Resident)

    run(body)


def test_they_end_with_the_cluster_and_leave_nothing_behind() -> None:
    made: list[Path] = []

    async def body(cluster: Cluster) -> list[int]:
        group = await launch(cluster, Resident)
        assert isinstance(cluster, LocalCluster) and cluster._folder and cluster._folder.path.is_dir()
        made.append(cluster._folder.path)
        processes: list[int] = await group.process()
        assert len({os.getpid(), *processes}) == 3
        assert await group.device_names() == [("cpu:0",), ("cpu:1",)]
        return processes

    assert all(is_gone(process) for process in run(body))
    assert not made[0].exists()


def test_a_killed_rank_is_an_error_that_says_what_it_was_doing() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident)
        processes = await group.process()
        running = group.sleeps(600.0)
        while not all(rank.open_calls for rank in cluster.processes):  # until the calls are sent
            await asyncio.sleep(0)
        os.kill(processes[1], signal.SIGKILL)
        await running

    with pytest.raises(WorkerDiedError, match=r"actor\[rank 1\] died while it ran sleeps\(\) since"):
        run(body)


def test_who_fails_of_a_death_does_not_hide_it() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident)
        await group.fails_with(await group.process())

    with pytest.raises(WorkerDiedError, match=r"actor\[rank 1\] died while it ran fails_with\(\)"):
        run(body)


def test_a_death_that_nobody_waits_for_ends_the_run() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident)
        os.kill((await group.process())[0], signal.SIGKILL)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(WorkerDiedError, match=r"actor\[rank 0\] died while it was idle"):
        run(body)


class Alone(Worker):
    """Of two, one dies as it is made; the other waits for it, as in torch.distributed's rendezvous."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def test_who_waits_for_one_that_died_as_it_was_made_is_ended_too() -> None:
    async def body(cluster: Cluster) -> None:
        await launch(cluster, Alone)

    with pytest.raises(WorkerDiedError, match=r"actor\[rank 1\] died while it ran __init__\(\)"):
        run(body)
    for child in multiprocessing.active_children():
        child.join(15)
        assert not child.is_alive(), "this process would wait for it at its exit"


def test_ctrl_c_is_the_controllers_business() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident)
        for process in await group.process():
            os.kill(process, signal.SIGINT)
        assert len(await group.process()) == 2

    run(body)


def test_a_factory_that_cannot_be_sent_is_named() -> None:
    async def body(cluster: Cluster) -> None:
        await launch(cluster, lambda context: Resident(context))

    with pytest.raises(InterlaceError, match="a function of a module"):
        run(body)


def test_errors_cross_processes() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident)
        with pytest.raises(UserError, match="batch=0 trains nothing"):
            await group.refuses()

    run(body)


@pytest.mark.slow  # four processes that import torch
def test_ranks_meet_for_torch_distributed_and_weights_cross() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Mate)
        assert await group.sum_of_ranks() == [3.0, 3.0]
        await cluster.dismiss(group)
        trainer = await launch(cluster, Trainer)
        engine = Engine(WorkerContext(group="rollout", rank=0, num_ranks=1, devices=()))
        for transport in ("shared_memory", "gloo", "object_store"):
            ref = WeightRef(version=3, parts=tuple(await trainer.export_weights(3, transport)))
            assert engine.update_weights(ref) == (3, "torch.bfloat16", 3.0, 2.5)

    run(body)


def test_each_process_is_traced_beside_what_runs_there() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, Resident, ranks=2)
        processes, running = await group.process(), group.sleeps(0.5)
        for process in cluster.processes:
            await process.call("start_trace", (PidTracer,), {})
        assert not running.task.done()
        traces = [(await process.call("stop_trace", (), {})).value for process in cluster.processes]
        assert {int(trace) for trace in traces} == set(processes)
        await running

    run(body)


class Endless(Worker):
    """Has an operation that does not end."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        server.ALONE_S = 0.1  # in its own process

    @operation(on_device=False)
    def hangs(self) -> None:
        os.write(1, f"{os.getpid()}\n".encode())  # whole, whoever writes beside it
        threading.Event().wait()


class Unmade(Endless):
    """Has a construction that does not end, such as one that waits for a rank that has died."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.hangs()


async def start_endless(worker: str, *preload: str) -> None:
    cluster = LocalCluster(two_devices(), Schedule(), hang_after_s=600)
    made = {"Endless": Endless, "Unmade": Unmade}[worker]
    spec = WorkerSpec(
        name="endless", factory=made, worker_class=made, devices=cluster.devices, num_ranks=2, preload=preload
    )
    await (await cluster.launch(spec)).hangs()


@pytest.mark.parametrize("preload", ["", "colorsys"])
@pytest.mark.parametrize(("worker", "is_stopped"), [("Endless", False), ("Endless", True), ("Unmade", False)])
def test_they_end_with_a_controller_that_was_killed_whatever_they_do(
    worker: str, preload: str, *, is_stopped: bool
) -> None:
    """Also if the controller was killed before it replaced a rank that a signal had stopped, or while a rank starts."""
    arguments = [worker, *([preload] if preload else [])]
    script = f"import asyncio; from {__name__} import start_endless; asyncio.run(start_endless(*{arguments}))"
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert controller.stdout
    ranks = [os.pidfd_open(int(controller.stdout.readline())) for _ in range(2)]
    if is_stopped:
        signal.pidfd_send_signal(ranks[0], signal.SIGSTOP)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    for rank in ranks:
        ended, _, _ = select.select([rank], [], [], 15)
        if not ended:
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)
        assert ended, "a rank outlived its controller"
