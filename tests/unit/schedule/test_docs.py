"""The comparison of presets in docs/schedules.md is generated from the presets and their measured figures."""

import re

import pytest
import yaml

from interlace.schedule.presets import preset_names, preset_path
from tests.support.docs_script import SCRIPT, measure_presets

OVERVIEW = SCRIPT.parents[1] / "schedules.md"


def test_the_generated_parts_are_up_to_date() -> None:
    text = OVERVIEW.read_text(encoding="utf-8")
    assert text == measure_presets().render_overview(text), "run: python docs/presets/measure.py tables"


@pytest.mark.parametrize("name", preset_names())
def test_the_comparison_shows_the_fields_of_every_preset(name: str) -> None:
    (row,) = [line for line in measure_presets().write_presets() if line.startswith(f"| `{name}` |")]
    fields = re.findall(r"`([^`]+)`", row.split(" | ")[2])
    assert yaml.safe_load("\n".join(fields)) == yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", preset_names())
def test_the_comparison_names_source_and_differences(name: str) -> None:
    (row,) = [line for line in measure_presets().write_presets() if line.startswith(f"| `{name}` |")]
    _, description, _, differences = row.strip("| ").split(" | ")
    assert "[source](https://" in description or "Ours." in description
    assert differences
