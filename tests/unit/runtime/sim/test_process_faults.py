"""Random deaths and stops of processes under random schedules."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.types import TerminalEvent
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.process_faults import ProcessFault, ProcessFaults
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, check, simulate


def random_faults(rng: random.Random) -> ProcessFaults:
    faults = [
        ProcessFault(
            name=str(number),
            role=rng.choice(["rollout", "rollout", "reward", "reference"]),
            kind=rng.choice(["kill", "stop"]),
            at_s=rng.uniform(0, rng.choice([1, 10, 100])),
            instance=rng.randrange(8),
        )
        for number in range(rng.randint(1, 6))
    ]
    return ProcessFaults(faults, rng.choice([0.0, 1.0, 50.0]))


def run_with(faults: ProcessFaults, schedule: Schedule, work: Workload) -> Record:
    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=faults.around)

    return simulate(schedule, work, make_cluster=cluster)


def run_one(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices)
    check(run_with(random_faults(rng), schedule, work), work, math.ceil(schedule.max_staleness))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_processes_that_end_cost_no_sample(seed: int) -> None:
    run_one(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_many_more_that_end_cost_no_sample(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        run_one(seed)


@pytest.mark.parametrize("seed", range(10))
def test_a_synchronous_run_trains_the_samples_of_the_run_without_faults(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices, synchronous=True)

    def trained(record: Record) -> list[tuple[str, int, int]]:
        ended = [entry.sample for entry in record.entries if entry.event == TerminalEvent.TRAINED]
        return sorted((sample.uid, sample.key.index, sample.num_tokens) for sample in ended)

    faults = random_faults(rng)
    assert trained(run_with(faults, schedule, work)) == trained(run_with(ProcessFaults([], 0.0), schedule, work))
