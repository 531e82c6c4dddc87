"""On the virtual clock, with long-tailed answers, presets do what they are named for."""

from statistics import fmean

import pytest

from interlace.algorithms.base import Needs
from interlace.core.types import Sample
from interlace.runtime.timeline import KeepAll
from interlace.schedule.presets import load_schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Record, Workload, check, simulate

LONG = Workload(
    prompts_per_step=8,
    num_steps=12,
    num_devices=8,
    needs=Needs(),
    costs=Costs(median_tokens=30, max_tokens=400, train_token=1e-4),
)


def run(name: str, recorder: KeepAll | None = None, **changes: object) -> Record:
    schedule = load_schedule(name, changes)
    record = simulate(schedule, LONG, recorder=recorder)
    check(record, LONG, schedule.staleness_bound)
    return record


def mixed(record: Record) -> list[Sample]:
    """Returns the samples with tokens of several versions."""
    samples = [ended.sample for result in record.results for ended in result.ended]
    return [sample for sample in samples if len(set(sample.versions.values)) > 1]


def swaps(recorder: KeepAll) -> dict[int, list[float]]:
    """Returns the seconds at which engines had taken each version; not every engine takes each."""
    found: dict[int, list[float]] = {}
    for span in recorder.spans:
        if span.operation == "update_weights":
            found.setdefault(span.version, []).append(span.end_s)
    return found


@pytest.mark.parametrize("name", ["laminar"])
def test_engines_swap_one_by_one_and_their_sequences_end_first(name: str) -> None:
    recorder = KeepAll()
    record = run(name, recorder, tail="none")
    spread = [max(ends) - min(ends) for version, ends in swaps(recorder).items() if 1 <= version < LONG.num_steps]
    assert fmean(spread) > 2 * LONG.costs.sync, "engines swapped together"
    assert not mixed(record), "a sequence ends under the version it began with"


def test_laminar_gathers_the_tail() -> None:
    assert run("laminar").results[-1].metrics["rollout/num_migrated"] > 0
    assert run("laminar").seconds < run("verl-colocated").seconds / 1.5


def test_verl_colocate_async_takes_devices_in_mid_sequence_and_resumes_after_the_update() -> None:
    recorder = KeepAll()
    record = run("verl-colocate-async", recorder)
    assert record.results[-1].metrics["rollout/num_interrupted"] > 0
    assert mixed(record), "what was aborted goes on under new weights"
    assert any(span.operation == "onload" for span in recorder.spans)
    assert run("verl-colocate-async").seconds < run("verl-colocated").seconds / 1.2
