"""Presets show their mechanisms on the virtual clock, with long-tailed answers."""

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


def run(name: str, recorder: KeepAll | None = None, /, **changes: object) -> Record:
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


@pytest.mark.parametrize("name", ["laminar", "dora"])
def test_engines_swap_one_by_one_and_their_sequences_end_first(name: str) -> None:
    recorder = KeepAll()
    record = run(name, recorder, tail="none")
    spread = [max(ends) - min(ends) for version, ends in swaps(recorder).items() if 1 <= version < LONG.num_steps]
    assert fmean(spread) > 2 * LONG.costs.sync, "engines swapped together"
    assert not mixed(record), "a sequence ends under the version it began with"


def test_laminar_gathers_the_last_sequences_of_engines_that_drain_so_that_the_others_swap() -> None:
    gathered, alone = run("laminar"), run("laminar", tail="none")
    assert gathered.results[-1].metrics["rollout/num_migrated"] > 0
    assert gathered.seconds < 0.95 * alone.seconds, "an engine that is emptied begins what is queued for it"
    assert not mixed(gathered), "among engines of one version"
    assert gathered.seconds < run("verl-colocated").seconds / 1.5


def test_verl_colocate_async_takes_devices_in_mid_sequence_and_resumes_after_the_update() -> None:
    recorder = KeepAll()
    record = run("verl-colocate-async", recorder)
    assert record.results[-1].metrics["rollout/num_interrupted"] > 0
    assert mixed(record), "what was aborted goes on under new weights"
    assert any(span.operation == "onload" for span in recorder.spans)
    assert run("verl-colocate-async").seconds < run("verl-colocated").seconds / 1.2


def overtaken(record: Record) -> int:
    """Returns how many younger groups were trained before one that they had overtaken, at most."""
    order = [gid for gids in record.minibatches for gid in dict.fromkeys(gids)]
    return max(sum(other > gid for other in order[:place]) for place, gid in enumerate(order))


def test_forge_bounds_how_many_younger_groups_overtake_one() -> None:
    window = 7  # 0.3 of the 24 groups that may be admitted at once
    assert overtaken(run("forge", overtake=None)) > window
    assert 0 < overtaken(run("forge")) <= window - 1
    assert overtaken(run("forge", overtake=0)) == 0


def test_dora_serves_several_versions_side_by_side() -> None:
    recorder = KeepAll()
    run("dora", recorder)
    serving = [(span.start_s, span.end_s, span.version) for span in recorder.spans if span.operation == "serve"]
    beside = [{version for begin, end, version in serving if begin <= start < end} for start, _, _ in serving]
    assert max(map(len, beside)) >= 3


def test_the_trainers_devices_generate_while_it_waits_for_its_batch() -> None:
    recorder = KeepAll()
    record = run("verl-separate-async-switch", recorder)
    serving = [span for span in recorder.spans if span.operation == "serve"]
    training = [span for span in recorder.spans if span.operation == "accumulate"]
    lent = {device for span in training for device in span.devices}
    assert lent == {4, 5, 6, 7} and {device for span in serving for device in span.devices} == set(range(8))
    on_lent = [span for span in serving if lent & {*span.devices}]
    assert all(one.end_s <= other.start_s or other.end_s <= one.start_s for one in on_lent for other in training)
    during = [one for one in serving for other in training if one.start_s < other.end_s and other.start_s < one.end_s]
    assert during, "the others go on meanwhile"
    assert mixed(record), "what waited goes on under new weights"


def test_a_loan_ends_at_its_share_of_the_batch() -> None:
    def waits_s(share: float | None) -> tuple[float, float]:
        """Seconds between the last work of lent engines and the training behind it, and sequences that moved."""
        recorder = KeepAll()
        record = run("verl-separate-async-switch", recorder, lend_until=share)
        training = [span for span in recorder.spans if span.operation == "accumulate"]
        lent = {device for span in training for device in span.devices}
        serving = [span.end_s for span in recorder.spans if span.operation == "serve" and lent & {*span.devices}]
        gaps = [each.start_s - max([end_s for end_s in serving if end_s <= each.start_s]) for each in training[1:]]
        return fmean(gaps), record.results[-1].metrics["rollout/num_migrated"]

    early_s, num_moved = waits_s(0.3)
    late_s, none_moved = waits_s(None)
    assert early_s > 2 * late_s
    assert num_moved > none_moved == 0
