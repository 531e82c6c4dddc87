"""A run that is resumed admits its groups in flight again, so that each sample ends exactly once."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from interlace.core.types import SampleKey, TerminalEvent
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=4, num_steps=6)


def run_with_restarts(schedule: Schedule, work: Workload, *boundaries: int, then: Schedule | None = None) -> Record:
    """Returns the records of a run that starts again from each of these boundaries, as one.

    then: the schedule after the first restart.
    """
    whole, start = Record(), None
    for boundary in (*boundaries, None):
        part = simulate(schedule, work, stop_after=boundary, start=start)
        schedule, start = then or schedule, part.boundary
        for result in part.results:
            whole.results.append(result)
            whole.add(result.ended)
        whole.staleness += part.staleness
    whole.add([entry for entry in part.entries if entry.sample.key not in whole.ended])
    return whole


def find_lost(record: Record, work: Workload) -> list[SampleKey]:
    num_groups = max(key.gid for key in record.ended) + 1
    keys = [SampleKey(gid, index) for gid in range(num_groups) for index in range(work.samples_per_prompt)]
    return [key for key in keys if key not in record.ended]


def asynchronous_presets() -> list[str]:
    return [name for name in preset_names() if load_schedule(name).staleness_bound]


@pytest.mark.parametrize("preset", asynchronous_presets())
def test_groups_in_flight_keep_their_numbers(preset: str) -> None:
    schedule = load_schedule(preset)
    record = run_with_restarts(schedule, WORK, 2, 4)
    assert find_lost(record, WORK) == []
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 4}
    assert max(record.staleness) <= schedule.staleness_bound


def test_a_sample_that_had_failed_before_the_restart_is_not_drawn_again() -> None:
    work = replace(WORK, costs=Costs(fail_share=0.3, max_tokens=800))
    schedule = load_schedule("areal")
    boundary = simulate(schedule, work, stop_after=3).boundary
    assert boundary is not None and any(group.ended for group in boundary.groups)
    record = run_with_restarts(schedule, work, 3)
    assert find_lost(record, work) == []
    assert record.events[TerminalEvent.FAILED] > 0


def test_a_schedule_that_launches_more_groups_ends_those_of_the_schedule_before() -> None:
    tail = Schedule.parse({"tail": {"kind": "oversample", "prompts": 1.5, "responses": 1.0}})
    boundary = simulate(load_schedule("areal"), WORK, stop_after=2).boundary
    assert boundary is not None
    record = run_with_restarts(load_schedule("areal"), WORK, 2, then=tail)
    assert find_lost(record, WORK) == []
    in_flight = [record.ended[SampleKey(group.gid, 0)] for group in boundary.groups]
    assert in_flight == [TerminalEvent.SURPLUS] * len(in_flight)
    uids = Counter(entry.sample.prompt.uid for entry in record.entries if entry.event == TerminalEvent.TRAINED)
    assert set(uids.values()) == {WORK.samples_per_prompt}


@pytest.mark.parametrize("then", ["verl-colocated", "one-step-off", "streamrl-sync", "areal"])
@pytest.mark.parametrize("filter_share", [0.3, 0.6])
def test_each_step_is_full_if_groups_are_dropped_after_a_change_of_the_schedule(then: str, filter_share: float) -> None:
    """The gate of another schedule admits the groups in flight in several parts, between which groups are dropped."""
    work = replace(WORK, costs=Costs(filter_share=filter_share, max_tokens=800))
    record = run_with_restarts(load_schedule("areal"), work, 2, then=load_schedule(then))
    trained = [
        len({each.sample.key.gid for each in result.ended if each.event == TerminalEvent.TRAINED})
        for result in record.results
    ]
    assert trained == [work.prompts_per_step] * work.num_steps


def test_a_run_without_further_steps_ends_its_groups_in_flight_as_surplus() -> None:
    schedule, short = load_schedule("areal"), replace(WORK, num_steps=3)
    boundary = simulate(schedule, WORK, stop_after=3).boundary
    assert boundary is not None and boundary.groups
    record = simulate(schedule, short, start=boundary)
    wanted = {SampleKey(group.gid, index) for group in boundary.groups for index in range(4)}
    assert record.ended == dict.fromkeys(wanted, TerminalEvent.SURPLUS)


@pytest.mark.parametrize("block", range(4))
def test_every_schedule_with_restarts_ends_each_sample_once_within_its_bound(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        work = replace(random_workload(rng), num_prompts=None)  # a recipe's prompts do not end
        schedule = random_schedule(rng, work.num_devices)
        boundaries = sorted(rng.sample(range(1, work.num_steps), min(2, work.num_steps - 1)))
        record = run_with_restarts(schedule, work, *boundaries)
        assert max(record.staleness, default=0) <= math.ceil(schedule.max_staleness), seed
        sizes = Counter(key.gid for key in record.ended)
        assert min(sizes.values(), default=9) >= work.samples_per_prompt, f"seed {seed}: a sample has no event"
        trained = [entry.sample for entry in record.entries if entry.event == TerminalEvent.TRAINED]
        keys = {(sample.prompt.uid, sample.key.gid) for sample in trained}
        assert len(keys) == len({uid for uid, _ in keys}), f"seed {seed}: a prompt was trained twice"


def test_an_oversampling_step_without_refills_uses_no_number_of_a_group_for_its_empty_places() -> None:
    tail = Schedule.parse({"tail": {"kind": "oversample", "prompts": 1.5, "responses": 1.0}})
    work = replace(WORK, costs=Costs(filter_share=0.6, max_tokens=800), refill_rounds=1)
    record = run_with_restarts(tail, work, 3)
    trained = record.events[TerminalEvent.TRAINED]
    assert trained < work.num_steps * work.prompts_per_step * work.samples_per_prompt, "no place stayed empty"
    assert find_lost(record, work) == []


def test_steps_of_a_resumed_run_have_the_groups_and_empty_places_of_an_uninterrupted_one() -> None:
    """Its places that had stayed empty were drawn again."""
    work = replace(WORK, costs=Costs(filter_share=0.6, max_tokens=800), refill_rounds=1)
    schedule = Schedule.parse({"max_staleness": 2, "batching": "step"})

    def count_groups(record: Record) -> list[int]:
        trained = [[each for each in result.ended if each.event == TerminalEvent.TRAINED] for result in record.results]
        return [len({each.sample.key.gid for each in ended}) for ended in trained]

    counts = count_groups(simulate(schedule, work))
    assert min(counts) < work.prompts_per_step
    assert count_groups(run_with_restarts(schedule, work, 1, 2)) == counts
