"""With long-tailed answers, each schedule shows its mechanism."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.docs_script import measure_presets
from tests.support.training import run_recipe, samples

STEPS = ("steps=5", "evaluation.num_prompts=2", "evaluation.samples_per_prompt=0", "logging.loggers=[]")
MIXED, INTERRUPTED = "sched/mixed_versions", "rollout/num_interrupted"
SUSPENDED, MIGRATED, SURPLUS = "rollout/num_suspended", "rollout/num_migrated", "samples/surplus"
COUNTED: Mapping[str, tuple[str, ...]] = {
    "areal": (MIXED, INTERRUPTED),
    "async-colocated": (MIXED,),
    "forge": (MIXED,),
    "kimi-partial-rollout": (MIXED, SUSPENDED),
    "laminar": (MIGRATED,),
    "magistral": (MIXED,),
    "pipelinerl": (MIXED,),
    "rlhfuse": (MIGRATED,),
    "rollpacker": (SURPLUS,),
    "verl-colocate-async": (MIXED, INTERRUPTED),
    "verl-fully-async-d": (MIXED, INTERRUPTED),
    "verl-separate-async-switch": (MIXED, INTERRUPTED),
}
"""Metrics that are above 0."""
WINDOW = 14
"""Groups that forge's window holds here: 0.3 of the 48 that may be in flight."""


def _some_overtake_within_the_window(root: Path, name: str) -> bool:
    order = [*dict.fromkeys(int(str(row["group"])) for row in samples(root, name) if row["event"] == "trained")]
    overtaken = [sum(other > group for other in order[:place]) for place, group in enumerate(order)]
    return 0 < max(overtaken) < WINDOW


def _engines_serve_several_versions_side_by_side(root: Path, name: str) -> bool:
    calls = [call for call in _calls(root, name) if call["pid"] == DEVICES]
    spans = [(call["ts"], call["ts"] + call["dur"], call["args"]["version"]) for call in calls]
    beside = [{version for begin, end, version in spans if begin <= start < end} for start, *_ in spans]
    return max(map(len, beside)) >= 2


def _the_trainers_devices_generate(root: Path, name: str) -> bool:
    calls = _calls(root, name)
    submitted = {(call["ts"], call["dur"]) for call in calls if call["pid"] == WORKERS and _begins_samples(call)}
    on = {call["tid"] for call in calls if call["pid"] == DEVICES and (call["ts"], call["dur"]) in submitted}
    return on == {0, 1, 2, 3}


DEVICES, WORKERS = 2, 3
"""Tracks of a timeline; samples are named on the worker's alone."""


def _calls(root: Path, name: str) -> list[dict[str, Any]]:
    events = json.loads((root / name / "timeline.json").read_text())
    return [event for event in events if event["ph"] == "X" and event["name"] == "rollout.serve"]


def _begins_samples(call: dict[str, Any]) -> bool:
    """Says whether a call began samples of the run, not of an evaluation."""
    return any(not sample.startswith("evaluation") for sample in call["args"].get("samples", ()))


TRACED: Mapping[str, Callable[[Path, str], bool]] = {
    "asyncflow": _engines_serve_several_versions_side_by_side,
    "dora": _engines_serve_several_versions_side_by_side,
    "forge": _some_overtake_within_the_window,
    "laminar": _engines_serve_several_versions_side_by_side,
    "verl-separate-async-switch": _the_trainers_devices_generate,
}
"""Findings in a run's samples and timeline."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("longtail")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted({*COUNTED, *TRACED}))
def test_the_mechanism_of_a_preset_is_at_work(root: Path, schedule: str) -> None:
    scaled = measure_presets().LONGTAIL_EXTRA.get(schedule, ())
    overrides = [f"schedule={schedule}", f"model.cache_dir={root / 'cache'}", *STEPS, *scaled]
    run_recipe("longtail", root, schedule, overrides)
    rows = [json.loads(line) for line in (root / schedule / "metrics.jsonl").read_text().splitlines()]
    seen = {name: fmean(row[name] for row in rows) for name in COUNTED.get(schedule, ())}
    assert all(seen.values()), seen
    assert TRACED[schedule](root, schedule) if schedule in TRACED else seen
    assert max(row["response_length/max"] for row in rows) >= 8 * fmean(row["response_length/mean"] for row in rows)
