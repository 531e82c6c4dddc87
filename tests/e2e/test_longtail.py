"""Where answers are long-tailed, each schedule does what it is named for."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.docs_script import measure_presets
from tests.support.training import run_recipe

STEPS = ("steps=5", "evaluation.num_prompts=2", "evaluation.samples_per_prompt=0", "logging.loggers=[]")
MIXED, INTERRUPTED = "sched/mixed_versions", "rollout/num_interrupted"
SUSPENDED, MIGRATED, SURPLUS = "rollout/num_suspended", "rollout/num_migrated", "samples/surplus"
SHOWN: Mapping[str, tuple[str, ...]] = {
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("longtail")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SHOWN))
def test_the_mechanism_of_a_preset_is_at_work(root: Path, schedule: str) -> None:
    scaled = measure_presets().LONGTAIL_EXTRA.get(schedule, ())
    overrides = [f"schedule={schedule}", f"model.cache_dir={root / 'cache'}", *STEPS, *scaled]
    run_recipe("longtail", root, schedule, overrides)
    rows = [json.loads(line) for line in (root / schedule / "metrics.jsonl").read_text().splitlines()]
    seen = {name: fmean(row[name] for row in rows) for name in SHOWN[schedule]}
    assert all(seen.values()), seen
    assert max(row["response_length/max"] for row in rows) >= 8 * fmean(row["response_length/mean"] for row in rows)
