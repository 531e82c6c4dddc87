"""docs/schedules.md and docs/reference/words.md are generated from presets, vocabulary and measured figures."""

import re
from pathlib import Path

import pytest
import yaml

from interlace.schedule.presets import preset_names, preset_path
from tests.support.docs_script import measure_presets


@pytest.mark.parametrize("page", measure_presets().PAGES, ids=lambda page: page.name)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == measure_presets().render_page(text), "run: python docs/presets/measure.py tables"


@pytest.mark.parametrize("name", preset_names())
def test_the_comparison_shows_the_fields_of_every_preset(name: str) -> None:
    (row,) = [line for line in measure_presets().write_presets() if line.startswith(f"| `{name}` |")]
    preset = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    shown = yaml.safe_load("\n".join(re.findall(r"`([^`]+)`", row.split(" | ")[2])))
    for field, value in shown.items():
        if isinstance(preset[field], dict) and field in ("placement", "granularity"):
            named = value if isinstance(value, dict) else {"others": value}
            shown[field] = {role: named.get(role, named.get("others")) for role in preset[field]}
    assert shown == preset


@pytest.mark.parametrize("name", preset_names())
def test_the_comparison_names_source_and_differences(name: str) -> None:
    (row,) = [line for line in measure_presets().write_presets() if line.startswith(f"| `{name}` |")]
    _, description, _ = row.strip("| ").split(" | ")
    description, _, differences = description.partition("<br>*Differences:* ")
    assert "[source](https://" in description or "Ours." in description
    assert differences
