"""The ledger of real runs, and what is made of it."""

import json
from pathlib import Path

import pytest

from interlace.observe.goodput import BINS, PREFIX
from tests.support.training import run


@pytest.mark.parametrize("schedule", ["verl-colocated", "areal"])
def test_every_device_second_of_a_real_run_is_in_one_bin(tmp_path: Path, schedule: str) -> None:
    report = run(tmp_path, "run", [f"schedule={schedule}"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        shares = [row[PREFIX + name] for name in BINS]
        assert min(shares) >= 0 and sum(shares) == pytest.approx(1, abs=1e-6)
        assert row["goodput/train"] > 0 and row["goodput/trained_tokens_per_device_s"] > 0
    assert any(row["goodput/generate"] > 0 for row in rows)
    steps_s = 2 * sum(row["timing_s/step"] for row in rows)
    assert report.books.total_s > steps_s
    assert report.books.seconds["startup"] > 0
    parts = report.books.total_s - report.books.seconds["startup"] - report.books.seconds["idle"]
    assert parts <= steps_s + 1e-6, "between the steps of these runs nothing but logging goes on"
