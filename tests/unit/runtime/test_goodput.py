"""Each device-second is in exactly one bin of the ledger."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.observe.goodput import BINS, PREFIX, Ledger
from interlace.runtime.goodput import Interval, fill, union, without
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, simulate

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))))


def seconds_of(intervals: list[Interval]) -> set[int]:
    return {second for low, high in intervals for second in range(int(low), int(high))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(first: list[Interval], second: list[Interval]) -> None:
    joined = union(first)
    assert seconds_of(joined) == seconds_of(first)
    assert all(before[1] < after[0] for before, after in pairwise(joined))
    assert seconds_of(without(joined, union(second))) == seconds_of(first) - seconds_of(second)


@given(st.lists(st.tuples(st.sampled_from(BINS), INTERVALS)))
def test_each_point_is_in_the_first_layer_that_covers_it(layers: list[tuple[str, list[Interval]]]) -> None:
    found = fill((3, 17), layers)
    owners = [next((name for name, spans in layers if second in seconds_of(spans)), "idle") for second in range(3, 17)]
    assert found == {name: owners.count(name) for name in BINS}


def fractions(metrics: dict[str, float]) -> list[float]:
    return [metrics[PREFIX + name] for name in BINS]


def check(record: Record) -> None:
    for result in record.results:
        shares = fractions(result.metrics)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert record.cluster is not None and record.books is not None
    assert record.books.total_s == pytest.approx(record.closed_s * len(record.cluster.devices), rel=1e-9)


@pytest.mark.parametrize("block", range(10))
def test_the_bins_add_up_under_random_schedules(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        work = random_workload(rng)
        check(simulate(random_schedule(rng, work.num_devices), work))


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
    waiting, ahead = last(load_schedule("verl-fully-async-a")), last(load_schedule("areal"))
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
    assert waste.sentence.startswith("Largest waste: tail_bubble, 30.0% of all device time; governed by tail")
