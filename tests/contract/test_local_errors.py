"""Errors of a local operation reach its caller, and a hanging operation does not keep the process alive."""

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from interlace.core.errors import InterlaceError, RemoteError, UserError
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import Worker, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import run_local


class Refusal(UserError):
    """One that pickle can write and not read."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def _fails_to_load() -> None:
    raise ValueError("not made here")


class Unreadable:
    def __reduce__(self) -> Any:
        return _fails_to_load, ()


class Odd(Worker):
    """Raises what is not expected of anybody."""

    @operation(on_device=False)
    def runs_out(self) -> int:
        found: int = next(iter(()))
        return found

    @operation(on_device=False)
    def exits(self) -> None:
        sys.exit(3)

    @operation(on_device=False)
    async def exits_later(self) -> None:
        sys.exit(3)

    @operation(on_device=False)
    async def is_cancelled(self) -> None:
        raise asyncio.CancelledError

    @operation(on_device=False)
    def refuses(self) -> None:
        raise Refusal("batch=0", "trains nothing")

    @operation(on_device=False)
    def unreadable(self) -> Unreadable:
        return Unreadable()


async def launch(cluster: Cluster, ranks: int) -> WorkerGroup[Any]:
    spec = WorkerSpec(name="odd", factory=Odd, worker_class=Odd, devices=cluster.devices[:ranks], num_ranks=ranks)
    return await cluster.launch(spec)


@pytest.mark.parametrize("ranks", [1, 2], ids=["thread", "processes"])
def test_whatever_an_operation_raises_is_raised_where_it_was_called(ranks: int) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, ranks)
        raised = {"runs_out": "StopIteration", "exits": "SystemExit", "exits_later": "SystemExit"}
        raised["is_cancelled"] = "CancelledError"
        for method, name in raised.items():
            with pytest.raises(RemoteError, match=name):
                await getattr(group, method)().wait(20)
        with pytest.raises(UserError, match="batch=0: trains nothing"):
            await group.refuses().wait(20)

    run_local(body, Schedule(), 100)


def test_a_result_that_cannot_be_read_here_is_named() -> None:
    async def body(cluster: Cluster) -> None:
        await (await launch(cluster, 2)).unreadable()

    with pytest.raises(
        InterlaceError, match=r"a reply cannot be read here \(ValueError: not made here\), it ran unrea"
    ):
        run_local(body, Schedule(), 100)


def test_a_thread_that_hangs_is_an_error_and_the_process_ends() -> None:
    script = """
        import asyncio, threading
        from interlace.runtime.local import cluster
        from interlace.runtime.worker import WorkerSpec
        from interlace.runtime.worker import Worker, operation
        from interlace.schedule.schedule import Schedule

        class Stuck(Worker):
            @operation(on_device=False)
            def hangs(self):
                threading.Event().wait()

        async def main():
            local = cluster.LocalCluster((), Schedule(), hang_after_s=0.5)
            async def flow():
                group = await local.launch(WorkerSpec(name="stuck", factory=Stuck, worker_class=Stuck))
                await group.hangs()
            try:
                await local.run(flow())
            finally:
                await local.shutdown()

        cluster.HURRIED_S = 0.1
        asyncio.run(main())
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail("the process never ended")
    assert "stuck runs hangs since" in ended.stderr and ended.returncode == 1


BLOCKED = """
    import asyncio, sys, time
    from interlace.runtime.local.cluster import LocalCluster
    from interlace.runtime.watchdog import LoopWatch
    from interlace.schedule.schedule import Schedule

    async def reads_slowly(seconds):
        await asyncio.sleep(0)
        time.sleep(seconds)
        await asyncio.sleep(60)

    async def main():
        local = LocalCluster((), Schedule(), hang_after_s=0.5)
        LoopWatch.GRACE_S = 1.0
        try:
            await local.run(reads_slowly(float(sys.argv[1])))
        finally:
            await local.shutdown()

    asyncio.run(main())
"""


@pytest.mark.parametrize(("seconds", "code"), [("1.2", 1), ("600", 3)])
def test_whoever_blocks_the_event_loop_is_named_and_the_process_ends(seconds: str, code: int) -> None:
    """In order where the loop goes on, else at once."""
    command = [sys.executable, "-c", textwrap.dedent(BLOCKED), seconds]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code, ended.stderr
    assert "the event loop has been blocked for" in ended.stderr
    assert "in reads_slowly" in ended.stderr
    assert ("could not be freed" in ended.stderr) == (code == 3)
