"""Random deaths and stops of processes under random schedules: see tests/random_faults.py."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.runtime.sim.cluster import ProcessFaults
from tests.random_faults import random_faults, run_all_virtual, run_with, trained
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import check


def run_one(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices)
    check(run_with(random_faults(rng), schedule, work), work, math.ceil(schedule.max_staleness))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_processes_that_end_cost_no_sample(seed: int) -> None:
    run_one(seed)


def test_a_tally_of_faults_has_no_broken_run() -> None:
    tally = run_all_virtual(60, first_seed=0)
    assert tally.num_faults >= 60 and tally.num_exact > 0
    assert not tally.broken


@pytest.mark.slow  # `python -m tests.random_faults virtual --faults 10000`, in blocks
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_faults_have_no_broken_run(block: int) -> None:
    assert not run_all_virtual(500, first_seed=block * 10_000).broken


@pytest.mark.parametrize("seed", range(10))
def test_a_synchronous_run_trains_the_samples_of_the_run_without_faults(seed: int) -> None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices, synchronous=True)
    faults = random_faults(rng)
    assert trained(run_with(faults, schedule, work)) == trained(run_with(ProcessFaults([], 0.0), schedule, work))
