"""Every preset trains on processes, and its ledger accounts for every device-second."""

import json
from pathlib import Path

import pytest

from interlace.schedule.presets import load_schedule, preset_names
from tests.support.ledgers import check_books
from tests.support.training import run

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_trains_on_processes(root: Path, preset: str) -> None:
    report = run(root, preset, [f"schedule={preset}", "cluster.backend=ray", "steps=4"])
    assert report.done_steps == 4 and report.after is not None
    rows = [json.loads(line) for line in (root / preset / "metrics.jsonl").read_text().splitlines()]
    check_books(root / preset, report)
    assert any(row["goodput/generate"] > 0 for row in rows) and all(row["goodput/train"] > 0 for row in rows)
    assert max(row["sched/staleness_max"] for row in rows) <= load_schedule(preset).staleness_bound
