"""The ledger of real runs, and what is made of it."""

import json
from pathlib import Path

import pytest

from interlace.schedule.presets import preset_names
from tests.support.ledgers import check_books
from tests.support.training import run

QUICK = ("verl-colocated", "areal", "rlinf-hybrid", "async-colocated")
"""Presets that every run of the tests trains under; the others are slow only because they are many."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in preset_names()]
)
def test_every_device_second_of_a_real_run_is_in_one_bin(root: Path, schedule: str) -> None:
    report = run(root, schedule, [f"schedule={schedule}"])
    check_books(root / schedule, report)
    rows = [json.loads(line) for line in (root / schedule / "metrics.jsonl").read_text().splitlines()]
    assert all(row["goodput/train"] > 0 and row["goodput/trained_tokens_per_device_s"] > 0 for row in rows)
    assert any(row["goodput/generate"] > 0 for row in rows)
    steps_s = 2 * sum(row["timing_s/step"] for row in rows)
    assert report.ledger.total_s > steps_s
    assert report.ledger.seconds["startup"] > 0
    parts = report.ledger.total_s - report.ledger.seconds["startup"] - report.ledger.seconds["idle"]
    if not any(row["sched/staleness_max"] for row in rows):
        assert parts <= steps_s + 1e-6, "between the steps nothing but logging goes on"
