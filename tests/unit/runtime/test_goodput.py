"""Each device-second is in exactly one bin of the ledger."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.observe.goodput import BINS, PREFIX, Ledger
from interlace.runtime.goodput import Interval, LedgerBuilder, common, fill, union, without
from interlace.runtime.group import WorkerGroup
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.timeline import EngineCall, Span
from interlace.runtime.worker import Worker, WorkerSpec, operation
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, simulate

INSTANT_S = 1e-9
"""Duration of a step whose samples were ready and whose training took no time, in seconds."""
INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))))


def seconds_of(intervals: list[Interval]) -> set[int]:
    return {second for low, high in intervals for second in range(int(low), int(high))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(first: list[Interval], second: list[Interval]) -> None:
    joined = union(first)
    assert seconds_of(joined) == seconds_of(first)
    assert all(before[1] < after[0] for before, after in pairwise(joined))
    assert seconds_of(without(joined, union(second))) == seconds_of(first) - seconds_of(second)
    assert seconds_of(common(joined, union(second))) == seconds_of(first) & seconds_of(second)


@given(st.lists(st.tuples(st.sampled_from(BINS), INTERVALS)))
def test_each_point_is_in_the_first_layer_that_covers_it(layers: list[tuple[str, list[Interval]]]) -> None:
    found = fill((3, 17), layers)
    owners = [next((name for name, spans in layers if second in seconds_of(spans)), "idle") for second in range(3, 17)]
    assert found == {name: owners.count(name) for name in BINS}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 64), st.integers(0, 9)), max_size=8))
def test_calls_that_ended_before_they_were_taken_in_leave_no_bin_negative(
    calls: list[tuple[int, int, int, int]],
) -> None:
    """On threads and processes a result is taken in after it was there: a step may end in between."""
    seconds = on_virtual_clock(_served(calls)).seconds
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(10)


async def _served(calls: Sequence[tuple[int, int, int, int]]) -> Ledger:
    """Of the window from 5 to 15. calls: (start, length, batch, tokens computed again) of each, in any order."""
    device = Device(index=0, pool="cpu", pool_index=0, memory_bytes=1)
    cluster = SimCluster((device,), Schedule(), hang_after_s=1e6)
    books, timeline = LedgerBuilder(cluster.lock, 1, [0]), cluster.timeline
    await asyncio.sleep(5)
    books.startup(timeline.take())
    await asyncio.sleep(10)
    for start_s, length_s, batch, num_repeated in calls:
        span = Span(
            start_s=start_s,
            end_s=start_s + length_s,
            devices=(0,),
            group="rollout/0",
            rank=0,
            operation="serve",
            bin="generate",
            cause="generate",
            step=1,
            version=0,
        )
        timeline.begin(span)
        timeline.end(span, start_s, start_s + length_s)
        served = EngineCall(
            span=span,
            devices=(0,),
            batch=batch,
            num_new_tokens=100,
            num_prompt_tokens=0,
            num_repeated_tokens=num_repeated,
        )
        timeline.serve(served)
    return books.step(timeline.take(), 3, 1)


def fractions(metrics: dict[str, float]) -> list[float]:
    return [metrics[PREFIX + name] for name in BINS]


def check(record: Record) -> None:
    for result in record.results:
        if result.metrics["timing_s/step"] <= INSTANT_S:
            continue
        shares = fractions(result.metrics)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-9)
        waiting = sum(result.metrics[PREFIX + name] for name in ("lock_wait", "tail_bubble", "pipeline_bubble"))
        at_most = waiting + result.metrics["goodput/idle"] + result.metrics["goodput/switch"]
        assert waiting - 1e-9 <= result.metrics["sched/bubble"] <= at_most + 1e-9
    assert record.cluster is not None and record.ledger is not None
    assert record.ledger.total_s == pytest.approx(record.closed_s * len(record.cluster.devices), rel=1e-9)


@pytest.mark.parametrize("block", range(10))
def test_the_bins_add_up_under_random_schedules(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        work = random_workload(rng)
        check(simulate(random_schedule(rng, work.num_devices), work))


class Sleeper(Worker):
    """Operations of a second each, or of as many as they are told."""

    @operation(bin="generate")
    async def serve(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @operation(bin="train")
    async def accumulate(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @operation(bin="train")
    async def optimizer_step(self, seconds: Sequence[float]) -> None:
        """As long as the rank's own number says."""
        await asyncio.sleep(seconds[self.context.rank])

    @operation(bin="idle")
    async def save(self) -> None:
        await asyncio.sleep(1)

    @operation(on_device=False)
    async def score(self) -> None:
        await asyncio.sleep(1)


async def _one_step() -> Ledger:
    devices = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=1) for i in range(2))
    cluster = SimCluster(devices, Schedule(), hang_after_s=1e6)

    async def launch(name: str, where: tuple[Device, ...]) -> WorkerGroup[Any]:
        return await cluster.launch(WorkerSpec(name=name, factory=Sleeper, worker_class=Sleeper, devices=where))

    engines = [await launch(f"rollout/{number}", (device,)) for number, device in enumerate(devices)]
    actor, reward = await launch("actor/0", devices), await launch("reward", ())
    books, timeline = LedgerBuilder(cluster.lock, 2, [0, 1]), cluster.timeline
    await asyncio.sleep(5)
    assert books.startup(timeline.take()).seconds == {**dict.fromkeys(BINS, 0.0), "startup": 10.0}
    serving = [engines[0].serve(3.0), engines[1].serve(1.0)]
    await asyncio.sleep(2)
    training = actor.accumulate(2.0)  # has to wait for the first engine until 3, and is done at 5
    await asyncio.gather(*serving, training)
    await reward.score()  # until 6
    await asyncio.sleep(1)  # until 7
    await engines[0].save()  # until 8
    serving = [engines[0].serve(2.0)]
    await asyncio.sleep(1)  # until 9; the call goes on
    first = books.step(timeline.take(), 30, 10)
    await asyncio.gather(*serving)
    second = books.between(timeline.take(), evaluated=True)
    assert second.seconds == {**dict.fromkeys(BINS, 0.0), "idle": 1.0, "tail_bubble": 1.0}
    return first


def on_virtual_clock(body: Coroutine[Any, Any, Ledger]) -> Ledger:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(body)
    finally:
        loop.close()
        asyncio.set_event_loop(None)


async def _ranks_of_unequal_work() -> Ledger:
    devices = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=1) for i in range(2))
    cluster = SimCluster(devices, Schedule(), hang_after_s=1e6)
    spec = WorkerSpec(name="actor", factory=Sleeper, worker_class=Sleeper, devices=devices, num_ranks=2)
    actor = await cluster.launch(spec)
    books = LedgerBuilder(cluster.lock, 2, [])
    books.startup(cluster.timeline.take())
    async with actor.hold("train"):
        await actor.optimizer_step([1.0, 3.0])
        await asyncio.sleep(2)  # the controller is busy, and the actor keeps its devices
    return books.step(cluster.timeline.take(), 1, 0)


def test_a_rank_that_is_done_first_waits_for_the_others_and_a_slow_controller_is_idle_time() -> None:
    seconds = on_virtual_clock(_ranks_of_unequal_work()).seconds
    assert {name: spent for name, spent in seconds.items() if spent} == {"train": 4, "lock_wait": 2, "idle": 4}


def test_a_step_whose_every_second_is_known() -> None:
    books = on_virtual_clock(_one_step())
    served = 3 + 1 + 1
    assert {name: seconds for name, seconds in books.seconds.items() if seconds} == pytest.approx(
        {
            "generate": served * 0.75,
            "discarded": served * 0.25,
            "train": 2 * 2,
            "tail_bubble": 1 + 1,  # the second engine: from 1 to 2 while the first serves, and from 8 to 9
            "lock_wait": 1,  # the second device, from 2 to 3: the actor waits for both
            "pipeline_bubble": 2 + 1,  # both while the reward is scored; the second while the first saves
            "idle": 2 + 1,  # nothing runs; a checkpoint is written
        }
    )


WORK = Workload(num_devices=4, num_steps=6, costs=Costs(train_token=1e-3))


@pytest.mark.parametrize("name", preset_names())
def test_the_bins_add_up_under_every_preset(name: str) -> None:
    check(simulate(load_schedule(name), WORK))


def last(schedule: Schedule, work: Workload = WORK) -> dict[str, float]:
    """Means over the steps but the first, which fills the pipeline."""
    results = simulate(schedule, work).results[1:]
    return {key: sum(r.metrics[key] for r in results) / len(results) for key in results[0].metrics if PREFIX in key}


def test_devices_that_take_turns_wait_for_the_tail_and_split_ones_for_each_other() -> None:
    in_turns = last(load_schedule("verl-colocated"))
    split = last(load_schedule("verl-fully-async-a"))
    assert in_turns["goodput/tail_bubble"] > 0
    assert split["goodput/pipeline_bubble"] > in_turns["goodput/pipeline_bubble"]


def test_running_ahead_shrinks_the_pipeline_bubble() -> None:
    """The same split of the devices, with and without a lead of generation."""
    split = load_schedule("one-step-off")
    in_step = Schedule.parse({**split.model_dump(), "max_staleness": 0, "pipeline_depth": None})
    waiting, ahead = last(in_step), last(split)
    assert ahead["goodput/pipeline_bubble"] < waiting["goodput/pipeline_bubble"]
    assert ahead["goodput/trained_tokens_per_device_s"] > waiting["goodput/trained_tokens_per_device_s"]


def test_what_is_not_trained_on_is_discarded() -> None:
    assert last(Schedule())["goodput/discarded"] == 0
    assert last(Schedule(), Workload(num_devices=4, costs=Costs(filter_share=0.5)))["goodput/discarded"] > 0.05
    oversampled = Schedule.parse({"tail": {"kind": "oversample", "prompts": 2, "responses": 1}})
    assert last(oversampled)["goodput/discarded"] > 0.05, "aborted sequences had tokens too"


def test_only_resumed_sequences_are_prefilled_again() -> None:
    fields = {"max_staleness": 2, "batching": "arrival", "placement": {"rollout": "0-50%", "actor": "50-100%"}}
    found = {how: last(Schedule.parse({**fields, "on_update": how})) for how in ("keep", "recompute", "abort_resume")}
    assert found["keep"]["goodput/re_prefill"] == 0
    assert found["recompute"]["goodput/re_prefill"] > 0
    assert found["abort_resume"]["goodput/re_prefill"] > 0


def test_an_empty_ledger_has_no_waste() -> None:
    assert Ledger().largest_waste() is None
    assert Ledger().metrics()["goodput/largest_waste"] == 0


def test_the_largest_waste_names_what_governs_it() -> None:
    waste = Ledger(seconds={"train": 5.0, "tail_bubble": 3.0, "idle": 2.0}).largest_waste()
    assert waste is not None
    assert (waste.name, waste.fraction) == ("tail_bubble", 0.3)
    assert waste.sentence.startswith("Largest waste: tail_bubble, 30.0% of the steps' device time; governed by tail")
