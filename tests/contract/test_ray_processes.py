"""A cluster of processes has guarantees beyond the contract."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.core.errors import InterlaceError, RemoteError, UserError, WorkerDiedError
from interlace.core.recovery import RestartBudget
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.process.rank import ProcessRank
from interlace.runtime.rank import Rank
from interlace.runtime.worker import RevivalRule, Worker, WorkerContext, WorkerSpec
from interlace.schedule.schedule import Schedule
from tests.contract.ray_workers import Engine, Mate, Resident, Trainer, large_array

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def run(body: Callable[[Cluster], Awaitable[Any]]) -> Any:
    from tests.contract.clusters import run_ray

    return run_ray(body, Schedule(), 100)


async def launch(cluster: Cluster, name: str, worker: type[Worker], ranks: int = 1) -> WorkerGroup[Any]:
    devices = cluster.devices[:ranks]
    return await cluster.launch(
        WorkerSpec(name=name, factory=worker, worker_class=worker, devices=devices, num_ranks=ranks)
    )


def is_gone(process: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow  # the default tests start Ray for a few only
def test_ranks_are_processes_that_end_with_the_cluster_and_take_their_children_along() -> None:
    async def body(cluster: Cluster) -> list[int]:
        group = await launch(cluster, "a", Resident, ranks=2)
        processes = await group.process()
        assert len({os.getpid(), *processes}) == 3
        assert await group.device_names() == [("cpu:0",), ("cpu:1",)]
        return [*processes, await group.child()]

    assert all(is_gone(process) for process in run(body))


def test_a_worker_that_is_killed_during_its_start_or_restoration_is_a_death_and_is_started_again(
    tmp_path: Path,
) -> None:
    """RemoteError would end the run, because it stands for a mistake in the worker's code."""

    mark = tmp_path / "the next start succeeds"

    def make(context: WorkerContext) -> Worker:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Resident(context)

    async def body(cluster: Cluster) -> None:
        rule = RevivalRule(budget=RestartBudget("reward", 9), repeats_calls=True)
        devices = cluster.devices[:1]
        group = await cluster.launch(
            WorkerSpec(name="reward", factory=make, worker_class=Resident, devices=devices, revival=rule)
        )
        (process,) = await group.process()
        restored: list[int] = []

        async def restore(ranks: Sequence[Rank]) -> None:
            restored.append((await ranks[0].call("process", (), {})).value)
            if len(restored) == 1:
                os.kill(restored[0], signal.SIGKILL)
            await ranks[0].call("process", (), {})

        assert group.rank_set.revival
        group.rank_set.revival.restore = restore
        mark.unlink()
        os.kill(process, signal.SIGKILL)
        assert await group.process() == restored[1:]
        assert len({process, *restored}) == 3

    with pytest.raises(WorkerDiedError, match=r"reward\[rank 0\] died while it ran __init__"):
        run(body)
    assert mark.exists()
    run(body)


def test_a_killed_worker_is_an_error_that_says_what_it_was_doing() -> None:
    killed: list[tuple[float, int]] = []

    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "rollout/0", Resident)
        (process,) = await group.process()
        running = group.sleeps(600.0)
        await asyncio.sleep(0)
        os.kill(process, signal.SIGKILL)
        killed.append((time.monotonic(), process))
        await running

    with pytest.raises(WorkerDiedError, match=r"rollout/0\[rank 0\] died while it ran sleeps\(\) since") as caught:
        run(body)
    when, process = killed[0]
    assert f"process {process}" in str(caught.value)
    assert time.monotonic() - when < 10, "seconds, on a machine that may be busy"


@pytest.mark.slow  # the default tests start Ray for a few only
def test_a_death_that_nobody_waits_for_ends_the_run() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "reward", Resident)
        os.kill((await group.process())[0], signal.SIGKILL)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(WorkerDiedError, match=r"reward\[rank 0\] died while it was idle"):
        run(body)


def test_how_a_child_ended_is_still_known() -> None:
    """In the command and in its ranks: a reward may run a program's tests."""

    async def body(cluster: Cluster) -> int:
        status: int = await (await launch(cluster, "reward", Resident)).child_status()
        return status

    assert subprocess.run(["false"], check=False).returncode == 1
    assert run(body) == 1


def test_a_child_that_cannot_be_reached_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from interlace.runtime.ray import cluster as ray_cluster
    from interlace.runtime.ray.actor import Endpoint

    found: list[Endpoint] = []

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody answers there")

    async def body(cluster: Cluster) -> None:
        get = ray.get
        monkeypatch.setattr(ray, "get", lambda *args, **kwargs: found.append(get(*args, **kwargs)) or found[-1])
        monkeypatch.setattr(ray_cluster.socket, "create_connection", refuse)
        with pytest.raises(OSError, match="nobody answers there"):
            ray_cluster.place_child("child", time.sleep, (0.0,))
        monkeypatch.undo()
        assert is_gone(found[0].process), "while the run continues"

    run(body)


def test_errors_cross_processes() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a", Resident)
        with pytest.raises(UserError, match="batch=0 trains nothing"):
            await group.refuses()
        with pytest.raises(RemoteError, match="cannot pickle 'generator'"):
            await group.unspeakable()
        with pytest.raises(InterlaceError, match="cannot be sent to another process"):
            await group.sleeps(number for number in range(3))
        group.notify(Resident.nudge)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RemoteError, match="nudged too hard"):
        run(body)


def test_large_arrays_arrive_whole_and_leave_nothing_behind() -> None:
    seen: list[set[Path]] = []

    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a", Resident)
        doubled = await group.doubled(large_array())
        np.testing.assert_array_equal(doubled, 2 * large_array())
        seen.append(shared_folders())

    run(body)
    assert seen[0] and not shared_folders()


def shared_folders() -> set[Path]:
    return set(Path("/dev/shm").glob(f"interlace-{os.getpid()}-*"))


@pytest.mark.slow  # three processes that import torch
def test_weights_go_through_the_object_store_once() -> None:
    async def body(cluster: Cluster) -> None:
        from interlace.runtime.ray.actor import StoredTensors
        from interlace.weights.ref import WeightRef

        trainer = await launch(cluster, "actor", Trainer)
        engines = [await launch(cluster, f"rollout/{number}", Engine) for number in range(2)]
        for version, transport in ((3, "object_store"), (4, "object_store"), (5, "shared_memory"), (6, "gloo")):
            ref = WeightRef(version=version, parts=tuple(await trainer.export_weights(version, transport)))
            in_store = transport == "object_store"
            assert not in_store or isinstance(ref.parts[0].source.tensors, StoredTensors)  # type: ignore[attr-defined]
            for engine in engines:
                assert await engine.update_weights(ref) == (version, "torch.bfloat16", float(version), 2.5)

    run(body)


@pytest.mark.slow  # two processes that import torch
def test_ranks_of_a_group_meet_for_torch_distributed() -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "actor", Mate, ranks=2)
        assert await group.sum_of_ranks() == [3.0, 3.0]

    run(body)


def test_devices_that_somebody_else_has_are_told_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.run.clusters.ray import open_cluster
    from interlace.run.recipe.sections import ClusterConfig
    from interlace.runtime.ray import session

    async def body(cluster: Cluster) -> None:
        monkeypatch.setattr(session, "RESERVE_WITHIN_S", 0.0)
        second = ClusterConfig(backend="ray", devices=f"cpu:{len(cluster.devices)}")
        with pytest.raises(UserError, match=r"free now: 0 CPUs\. Request fewer"):
            open_cluster(second, Schedule())

    run(body)


@pytest.mark.slow  # starts a second Ray of two nodes
def test_a_running_cluster_of_two_nodes_is_joined_and_left() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.two_nodes"], capture_output=True, text=True, check=False
    )
    assert "nodes: 2\nleft: True" in done.stdout, done.stderr


def test_a_rank_s_clock_is_known_to_within_the_error_it_states() -> None:
    """Both processes read this machine's clock here, so the difference is known."""

    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a", Resident)
        for _ in range(20):
            await group.process()
        [rank] = cluster.processes
        assert isinstance(rank, ProcessRank)
        true_s = time.monotonic() - cluster.clock.now()
        off_by_s = abs(rank.open_calls.clock_offset.offset_s - true_s)
        assert off_by_s <= rank.open_calls.clock_offset.error_s + 1e-4, (
            "the two clocks here are read one after the other"
        )

    run(body)
