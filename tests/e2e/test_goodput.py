"""The ledger of real runs, and what is made of it."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

from interlace import workers
from interlace.observe.goodput import BINS, PREFIX
from interlace.runtime.goodput import OPERATIONS
from interlace.runtime.worker import Worker, operation_of
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


def test_every_operation_on_a_device_has_a_bin_or_serves_no_step() -> None:
    found = set()
    for module in pkgutil.iter_modules(workers.__path__, "interlace.workers."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, Worker):
                ways = {name: operation_of(kind, name) for name in dir(kind)}
                found |= {name for name, how in ways.items() if how is not None and how.on_device}
    assert found - set(OPERATIONS) == {"copy_checkpoint", "load_optimizer", "memory_bytes", "close"}, "idle time"
    assert set(OPERATIONS.values()) <= set(BINS)
