"""Random schedules, placements and workloads keep all invariants on the virtual clock."""

import math
import random
from dataclasses import replace

import pytest

from interlace.core.errors import InterlaceError
from interlace.runtime.sim.cluster import SimCluster, with_faults
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.random_schedules import random_fault, random_schedule, random_workload
from tests.support.sim_run import check, check_minibatches, simulate


def run_one(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices)
    record = simulate(schedule, work)
    check(record, work, math.ceil(schedule.max_staleness))
    check_minibatches(record, work, in_order=schedule.batches_are_fixed)


@pytest.mark.parametrize("block", range(10))
def test_every_schedule_ends_with_each_sample_ended_once_within_its_bound(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        run_one(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_many_more_schedules(block: int) -> None:
    for seed in range(1000 + block * 100, 1100 + block * 100):
        run_one(seed)


def run_one_with_a_fault(seed: int) -> None:
    """It ends whole, or with an error that names who is gone or waited for."""
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule, fault = random_schedule(rng, work.num_devices), random_fault(rng)

    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=with_faults([fault]))

    try:
        record = simulate(schedule, work, make_cluster=cluster)
    except InterlaceError as error:
        assert fault.kind != "stall" and fault.group in str(error)
    else:
        check(record, work, math.ceil(schedule.max_staleness))


def test_whatever_goes_wrong_a_schedule_ends_whole_or_says_why() -> None:
    for seed in range(100):
        run_one_with_a_fault(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_so_do_many_more_that_go_wrong(block: int) -> None:
    for seed in range(1000 + block * 100, 1100 + block * 100):
        run_one_with_a_fault(seed)


@pytest.mark.parametrize(
    "seed",
    [
        2970,  # the next version was published while an engine swapped, which then began sequences with the last one
        4537,  # a partial was moved to an engine that was two versions behind and still ended what it had begun
    ],
)
def test_schedules_that_once_went_beyond_their_bound(seed: int) -> None:
    run_one(seed)


@pytest.mark.parametrize("seed", range(25))
def test_synchronous_schedules_train_on_the_same_prompts_in_every_version(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    found = []
    for _ in range(3):
        schedule = random_schedule(rng, work.num_devices, synchronous=True)
        schedule = schedule.model_copy(update={"sync_every": 1})
        found.append(simulate(schedule, work).trained)
    assert found[0] == found[1] == found[2]


def test_a_run_is_the_same_each_time() -> None:
    rng = random.Random(5)
    work = replace(random_workload(rng), num_devices=4)
    schedule = random_schedule(rng, 4)
    first, second = simulate(schedule, work), simulate(schedule, work)
    assert first.seconds == second.seconds
    assert [result.metrics for result in first.results] == [result.metrics for result in second.results]
