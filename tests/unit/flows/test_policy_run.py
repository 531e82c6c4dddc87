"""What the policy flow promises of its steps, on the virtual clock."""

from dataclasses import replace

import pytest

from interlace.algorithms.base import Needs
from interlace.core.types import TerminalEvent
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=3, num_steps=5)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_trains_every_step_within_its_bound(name: str) -> None:
    schedule = load_schedule(name)
    record = simulate(schedule, WORK)
    assert [len(step) for step in record.trained] == [4] * 5
    assert max(record.staleness) <= schedule.staleness_bound


def test_filtered_groups_are_replaced_until_the_batch_is_full() -> None:
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=0.5)))
    assert [len(step) for step in record.trained] == [4] * 5
    assert record.events[TerminalEvent.FILTERED] > 0


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_batch_stays_short_once_its_refills_are_used_up(rounds: int) -> None:
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=0.7), refill_rounds=rounds))
    assert len(record.results) == 5, "a short batch is still a step"
    assert min(len(step) for step in record.trained) < 4
    launched = sum(record.events.values()) / WORK.samples_per_prompt
    assert launched <= 4 * 5 * (1 + rounds)


def test_a_batch_that_lost_all_its_groups_is_a_step_without_an_update() -> None:
    record = simulate(Schedule(), replace(WORK, costs=Costs(filter_share=1.0), refill_rounds=1))
    assert [len(step) for step in record.trained] == [0] * 5
    assert [result.version for result in record.results] == [1, 2, 3, 4, 5]


def test_failed_samples_leave_their_group_while_two_remain() -> None:
    record = simulate(Schedule(), replace(WORK, samples_per_prompt=4, costs=Costs(fail_share=0.3)))
    assert record.events[TerminalEvent.FAILED] > 0
    assert record.events[TerminalEvent.TRAINED] < 4 * 4 * 5
    assert [len(step) for step in record.trained] == [4] * 5


def test_the_end_of_the_data_ends_the_run_with_a_short_batch() -> None:
    record = simulate(Schedule(), replace(WORK, num_prompts=10))
    assert [len(step) for step in record.trained] == [4, 4, 2]


def test_a_greedy_baseline_is_measured_for_each_group() -> None:
    record = simulate(Schedule(), replace(WORK, needs=Needs(greedy_baseline=True)))
    assert [len(step) for step in record.trained] == [4] * 5


def test_a_stop_leaves_nothing_half_done() -> None:
    record = simulate(Schedule(max_staleness=2, batching="arrival", on_update="keep"), WORK, stop_after=2)
    assert len(record.results) == 2
    assert record.events[TerminalEvent.TRAINED] == 2 * 4 * 3
    assert sum(record.events.values()) == len(record.ended)


def test_a_split_pipeline_takes_less_time_than_turns() -> None:
    work = replace(WORK, num_steps=10, costs=Costs(train_token=2e-3))
    turns = simulate(load_schedule("verl-colocated"), work)
    pipeline = simulate(load_schedule("one-step-off"), work)
    assert pipeline.seconds < 0.9 * turns.seconds
