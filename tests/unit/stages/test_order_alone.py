"""The controller's actions depend on the order of results alone, not on the clock."""

import random
from dataclasses import replace

import pytest

from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Workload, simulate

SLOWER = 4.0
"""A power of two: every sum of durations is scaled exactly, so ties stay ties."""


def slowed(costs: Costs) -> Costs:
    seconds = ("decode", "score", "reference_token", "train_token", "optimizer", "sync", "prefill_token")
    return replace(costs, **{name: SLOWER * getattr(costs, name) for name in seconds})


def check_slower_is_the_same(schedule: Schedule, work: Workload) -> None:
    run = simulate(schedule, work)
    slow = simulate(
        schedule.model_copy(update={"min_hold": SLOWER * schedule.min_hold}), replace(work, costs=slowed(work.costs))
    )
    assert list(slow.ended.items()) == list(run.ended.items()), "each sample's end, in order"
    assert slow.minibatches == run.minibatches
    assert slow.num_stalls == run.num_stalls
    assert slow.seconds == pytest.approx(SLOWER * run.seconds)


@pytest.mark.parametrize("name", preset_names())
def test_a_slower_machine_changes_no_decision_of_a_preset(name: str) -> None:
    check_slower_is_the_same(load_schedule(name), Workload(costs=Costs(train_token=1e-3, memory=60)))


@pytest.mark.parametrize("block", range(3))
def test_nor_of_random_schedules(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        work = random_workload(rng)
        check_slower_is_the_same(random_schedule(rng, work.num_devices), work)
