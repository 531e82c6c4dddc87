"""A new schedule is one YAML file: the example of docs/extending.md runs unmodified."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.core.types import TerminalEvent
from interlace.runtime.timeline import KeepAll
from interlace.schedule.presets import load_schedule, preset_names
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_workload
from tests.support.sim_run import Workload, simulate
from tests.support.training import metrics, run, samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def gathered(tmp_path: Path) -> Path:
    """Engines that keep their caches through updates and gather their tails."""
    found = re.search(r"```yaml\n# gathered.yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "docs/extending.md shows the preset"
    path = tmp_path / "gathered.yaml"
    path.write_text(found[1], encoding="utf-8")
    return path


def test_it_is_a_corner_that_no_shipped_preset_has(gathered: Path) -> None:
    def corner(name: str) -> tuple[str, str, str]:
        schedule = load_schedule(name)
        return schedule.weight_update, schedule.tail.kind, schedule.batching

    assert corner(str(gathered)) == ("all_at_once", "migrate", "arrival")
    assert corner(str(gathered)) not in map(corner, preset_names())


def test_it_trains_every_step_within_its_bound_and_loses_no_sample(gathered: Path) -> None:
    schedule = load_schedule(str(gathered))
    long_tailed = Costs(median_tokens=30, max_tokens=400, train_token=1e-4)
    work = Workload(prompts_per_step=8, num_steps=12, num_devices=8, costs=long_tailed)
    recorder = KeepAll()
    record = simulate(schedule, work, recorder=recorder)
    assert [len(step) for step in record.trained] == [8] * 12
    assert 0 < max(record.staleness) <= schedule.staleness_bound
    assert record.num_opened == len(record.ended), "each sample ended, and none twice"
    assert record.events[TerminalEvent.TRAINED] == 12 * 8 * work.samples_per_prompt
    mixed = [e for r in record.results for e in r.ended if len(e.sample.versions.values) > 1]
    assert mixed, "weights arrived in mid-sequence"
    assert any(span.operation == "abort" for span in recorder.spans), "the survivors of a tail were taken elsewhere"


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_its_promises_under_any_workload(gathered: Path, seed: int) -> None:
    schedule = load_schedule(str(gathered))
    work = replace(random_workload(random.Random(seed)), num_devices=4)
    record = simulate(schedule, work)
    assert max(record.staleness, default=0) <= math.ceil(schedule.max_staleness)
    assert record.num_opened == len(record.ended)


@pytest.mark.slow  # a real run, of some twenty seconds
def test_it_trains_a_real_model(gathered: Path, tmp_path: Path) -> None:
    changes = [f"schedule={gathered}", "steps=8", "cluster.devices=cpu:4"]
    report = run(tmp_path, "gathered", changes)
    assert report.done_steps == 8
    ended = samples(tmp_path, "gathered")
    assert max(Counter((row["uid"], row["index"]) for row in ended).values()) == 1
    assert sum(row["event"] == "trained" for row in ended) == 8 * 16
    assert max(line["sched/staleness_max"] for line in metrics(tmp_path, "gathered")) <= 4
