"""docs/schedules.md and docs/reference/words.md are generated from presets, vocabulary and measured figures."""

import re
from pathlib import Path

import pytest

from interlace.schedule.presets import load_schedule, preset_names, preset_path
from tests.support.docs_script import measure_presets


@pytest.mark.parametrize("page", measure_presets().PAGES, ids=lambda page: page.name)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == measure_presets().render_page(text), "run: python docs/presets/measure.py tables"


@pytest.mark.parametrize("name", preset_names())
def test_the_comparison_shows_devices_staleness_and_source_of_every_preset(name: str) -> None:
    link = f"[`{name}`](../interlace/schedule/presets/{name}.yaml)"
    (row,) = [line for line in measure_presets().write_presets() if line.startswith(f"| {link} |")]
    _, description, devices, staleness, *_ = row.split(" | ")
    schedule = load_schedule(name)
    assert devices == f"`{schedule.placement.of('rollout').devices}`"
    assert float(staleness) == schedule.max_staleness
    assert "](https://" in description or "Ours." in description


@pytest.mark.parametrize("name", preset_names())
def test_the_file_of_every_preset_names_its_differences_from_the_original(name: str) -> None:
    comments = [line for line in preset_path(name).read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(re.match(r"# Differences: \w", line) for line in comments)
