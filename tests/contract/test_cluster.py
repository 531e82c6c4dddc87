"""The contract of a cluster, tested for every back end."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from interlace.core.errors import HangError, InterlaceError, RemoteError, UserError
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import CLUSTERS
from tests.contract.workers import Broken, Closing, Item, Recorder, Unending

Run = Callable[..., Any]


@pytest.fixture(params=["local", "sim", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "ray":
        request.getfixturevalue("ray_session")

    def go(body: Callable[[Cluster], Any], schedule: Schedule | None = None, memory_bytes: int = 100) -> Any:
        return CLUSTERS[request.param](body, schedule or Schedule(), memory_bytes)

    return go


def wrok() -> None:
    """No operation of any worker."""


async def launch(
    cluster: Cluster, name: str, *, devices: tuple[int, ...] = (0,), ranks: int = 1, memory: int = 10, stage: int = 0
) -> WorkerGroup[Any]:
    spec = WorkerSpec(
        name=name,
        factory=partial(Recorder, memory=memory),
        worker_class=Recorder,
        devices=tuple(cluster.devices[i] for i in devices),
        num_ranks=ranks,
        stage=stage,
    )
    return await cluster.launch(spec)


def test_a_call_returns_the_result(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        assert await group.work("x") == 0
        assert await group.later(7) == 7

    run(body)


def test_a_call_in_the_caller_s_own_task_is_a_call_like_any_other(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        found, span = await group.inline(Recorder.work, "x")
        assert found == 0 and span.operation == "work" and span.devices == (0,)
        async with group.hold("held"):
            found, span = await group.inline(Recorder.later, 7)
        assert found == 7 and span.cause == "held" and span.start_s <= span.end_s < math.inf
        with pytest.raises(RemoteError, match=r"a\[rank 0\].fails\(\) raised"):
            await group.inline(Recorder.fails)
        with pytest.raises(AttributeError, match="Did you mean 'work'"):
            await group.inline(wrok)

    run(body)


def test_results_of_ranks_are_collected_as_declared(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a", devices=(0, 1), ranks=2)
        assert await group.everywhere() == [0, 1]
        items = [Item(value, tokens) for value, tokens in [(1, 5), (2, 100), (3, 5), (4, 5)]]
        found = await group.squares(items)
        assert [square for square, _ in found] == [1, 4, 9, 16], "back in the argument's order"
        assert [rank for _, rank in found] == [1, 0, 1, 1], "dealt by load"

    run(body)


def test_a_remote_exception_says_where_and_keeps_the_traceback(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        with pytest.raises(RemoteError, match=r"a\[rank 0\].fails\(\) raised") as caught:
            await group.fails()
        assert "KeyError: 'no such thing'" in caught.value.remote_traceback
        assert "in fails" in caught.value.remote_traceback
        assert await group.work("still there") == 0

    run(body)


def test_a_worker_that_cannot_start_says_why(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        with pytest.raises(RemoteError, match="cannot start"):
            await cluster.launch(WorkerSpec(name="b", factory=Broken, worker_class=Broken))

    run(body)


def test_an_unknown_operation_names_the_nearest(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        with pytest.raises(AttributeError, match="Did you mean 'work'"):
            group.wrk("x")
        with pytest.raises(InterlaceError, match="not declared concurrent"):
            group.notify(Recorder.work, "x")

    run(body)


def test_calls_of_a_group_run_one_at_a_time_in_their_order(run: Run) -> None:
    async def body(cluster: Cluster) -> list[str]:
        group = await launch(cluster, "a")
        await asyncio.gather(*(group.work(str(number)) for number in range(20)))
        return await group.history()

    assert run(body) == ["onload", *(str(number) for number in range(20))]


def test_waiting_with_a_limit_leaves_the_operation_going(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        handle = group.later(1)
        with pytest.raises(InterlaceError, match="it continues"):
            await handle.wait(timeout_s=0.0)
        assert await handle.wait(timeout_s=10) == 1

    run(body)


def test_devices_change_hands_and_state_stays_while_it_fits(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await launch(cluster, "first"), await launch(cluster, "second")
        for _ in range(2):
            await first.work("x")
            await second.work("y")
        assert await first.history() == ["onload", "x", "x"]
        assert cluster.lock.count_loaded_bytes(0) == 20

    run(body)


def test_the_least_recently_used_leaves_when_the_next_does_not_fit(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        groups = [await launch(cluster, name, memory=40) for name in "abc"]
        for group in groups:
            await group.work("x")
        assert await groups[0].history() == ["onload", "x", "offload"]
        assert await groups[1].history() == ["onload", "x"]
        await groups[0].work("again")
        assert await groups[1].history() == ["onload", "x", "offload"]
        assert cluster.lock.count_loaded_bytes(0) == 80

    run(body)


def test_a_group_says_how_its_state_leaves_and_is_told_when_it_has(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = [await launch(cluster, name, memory=60) for name in "ab"]
        told: list[str] = []

        class Leaving:
            unload_arguments = ("dropped",)

            def ask_to_yield(self) -> None:
                told.append("asked")

            def record_unloaded(self, parts: Sequence[str]) -> None:
                told.append(f"{' '.join(parts)} gone")

        first.state.set_driver(Leaving())
        await first.work("x")
        await second.work("y")
        assert told == ["state gone"]
        assert await first.history() == ["onload", "x", "dropped"]

    run(body)


def test_a_worker_of_ones_own_starts_where_a_placement_says(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await cluster.start("own", Recorder, 30, on="0")
        assert await group.work("x") == 0
        assert cluster.lock.count_loaded_bytes(0) == 30
        with pytest.raises(UserError, match=r"placement.other = '9' names device 9"):
            await cluster.start("other", Recorder, 30, on="9")

    run(body)


def test_what_cannot_fit_alone_is_refused_at_launch(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        with pytest.raises(UserError, match="smaller model"):
            await launch(cluster, "big", memory=101)

    run(body)


def test_a_hold_keeps_the_devices_over_several_calls(run: Run) -> None:
    async def body(cluster: Cluster) -> list[str]:
        first, second = await launch(cluster, "first"), await launch(cluster, "second", stage=1)
        order: list[str] = []

        async def other() -> None:
            await second.work("y")
            order.append("second")

        async with first.hold("test"):
            waiting = asyncio.ensure_future(other())
            for _ in range(3):
                await first.work("x")
                order.append("first")
            assert cluster.lock.is_wanted(first.device_indices)
        await waiting
        return order

    assert run(body) == ["first", "first", "first", "second"]


def test_a_hold_is_its_task_s_own(run: Run) -> None:
    """Another task's call on the same group waits, and the devices stay taken until the last of them is done."""

    async def body(cluster: Cluster) -> list[str]:
        group, other = await launch(cluster, "group"), await launch(cluster, "other", stage=1)
        order: list[str] = []

        async def call(who: WorkerGroup[Any], name: str) -> None:
            await who.later(0)
            order.append(name)

        async with group.hold("test"):
            inner = asyncio.ensure_future(call(group, "group, another task"))
            downstream = asyncio.ensure_future(call(other, "other"))
            await group.later(0)
            order.append("group, holder")
        await asyncio.gather(inner, downstream)
        return order

    assert run(body) == ["group, holder", "other", "group, another task"]


def test_a_concurrent_operation_does_not_wait_for_the_running_one(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        running = group.later(1)
        group.notify(Recorder.nudge)
        assert (await group.history())[0] == "nudge"
        await running

    run(body)


def test_coroutine_operations_overlap_off_the_device_and_take_turns_on_it(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        assert await asyncio.gather(group.overlapping(), group.overlapping()) == [2, 2]
        assert await asyncio.gather(group.in_turn(), group.in_turn()) == [1, 1]

    run(body)


def test_every_operation_is_a_span_on_its_devices(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a/0", devices=(0, 1))
        cluster.timeline.step, cluster.timeline.version = 3, 2
        async with group.hold("train"):
            await group.work("x")
            await group.with_cause("publication").work("y")
            going_on = group.later(1)
            while not going_on.spans:
                await asyncio.sleep(0)
            records = cluster.timeline.take()
            await going_on
        *_, first, second = records.spans
        assert (first.group, first.role, first.operation, first.cause) == ("a/0", "a", "work", "train")
        assert (first.step, first.version, first.devices) == (3, 2, (0, 1))
        assert second.cause == "publication"
        assert first.start_s <= first.end_s <= second.start_s <= second.end_s <= records.end_s
        assert [span.operation for span in records.running] == ["later"]
        [ended] = cluster.timeline.take().spans
        assert ended is records.running[0] and ended.end_s < math.inf

    run(body)


def test_each_rank_has_spans_on_its_own_devices(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a", devices=(0, 1), ranks=2)
        cluster.timeline.take()
        await group.everywhere()
        spans = [span for span in cluster.timeline.take().spans if span.operation == "everywhere"]
        assert {span.rank: span.devices for span in spans} == {0: (0,), 1: (1,)}

    run(body)


def test_spans_tell_when_the_rank_was_at_work_and_not_how_long_a_call_queued(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        group = await launch(cluster, "a")
        async with group.hold("test"):
            await asyncio.gather(*(group.in_turn() for _ in range(3)))
        spans = [span for span in cluster.timeline.take().spans if span.operation == "in_turn"]
        ordered = sorted(spans, key=lambda span: span.start_s)
        assert len(ordered) == 3
        error_s = 1e-3  # of a clock in another process
        assert all(before.end_s <= after.start_s + error_s for before, after in pairwise(ordered))

    run(body)


def test_a_worker_is_closed_however_the_run_ends(run: Run, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def body(cluster: Cluster) -> None:
        spec = WorkerSpec(name="a", factory=partial(Closing, note=note), worker_class=Closing)
        await (await cluster.launch(spec)).fails()

    with pytest.raises(RemoteError):
        run(body)
    assert note.read_text() == "closed"


def test_a_worker_that_does_not_end_well_keeps_no_other_from_its_end(run: Run, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def body(cluster: Cluster) -> None:
        await cluster.launch(WorkerSpec(name="a", factory=partial(Closing, note=note), worker_class=Closing))
        await cluster.launch(WorkerSpec(name="b", factory=Unending, worker_class=Unending))

    with suppress(RuntimeError):  # of another process nothing is heard any more
        run(body)
    assert note.read_text() == "closed"


def test_a_stage_s_exception_ends_the_run(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        async def stage() -> None:
            raise ValueError("a stage broke")

        cluster.spawn(stage(), name="stage")
        await asyncio.get_running_loop().create_future()

    with pytest.raises(ValueError, match="a stage broke"):
        run(body)


def test_a_hang_is_an_error_that_names_who_waits_for_what(run: Run) -> None:
    async def body(cluster: Cluster) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await cluster.waits.wait_for(never, who="trainer", what="a batch that never comes")

    with pytest.raises(HangError, match="trainer waits for a batch that never comes"):
        run(body)


def test_a_stall_can_be_resolved(run: Run) -> None:
    async def body(cluster: Cluster) -> str:
        stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def resolve() -> bool:
            if not stuck.done():
                stuck.set_result("flushed")
                return True
            return False

        cluster.watchdog.on_stall(resolve)
        return await cluster.waits.wait_for(stuck, who="stage", what="a full granule")

    assert run(body) == "flushed"
