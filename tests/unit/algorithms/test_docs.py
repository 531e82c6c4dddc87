"""Each algorithm has a page that names its particular settings."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from interlace.algorithms import Needs, algorithm_names, create_algorithm
from interlace.algorithms.policy import PolicySettings
from interlace.core.yaml_text import parse_yaml
from tests.support.docs_script import measure_algorithms

PAGES = Path(__file__).parents[3] / "docs" / "algorithms"


def own_settings(name: str) -> list[str]:
    """Settings that the common ones lack, or whose default differs from theirs."""
    fields = type(create_algorithm(name, {}).settings).model_fields
    common = PolicySettings.model_fields
    return [key for key, field in fields.items() if key not in common or field.default != common[key].default]


@pytest.mark.parametrize("name", algorithm_names())
def test_the_page_names_every_setting_of_its_own(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    missing = [key for key in own_settings(name) if f"`{key}`" not in text]
    assert not missing, f"docs/algorithms/{name}.md does not name {missing}"
    assert f"[{name}]({name}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", algorithm_names())
def test_the_page_tells_the_defaults_of_its_own(name: str) -> None:
    settings = create_algorithm(name, {}).settings
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {key: parse_yaml(value) for key, value in rows if key in type(settings).model_fields}
    found = {key: getattr(settings, key) for key in told}
    if found.get("aggregation_length", 0) is None:
        found["aggregation_length"] = "max_new_tokens"  # the recipe's
    assert told == found


def test_the_common_settings_are_in_the_readme() -> None:
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    missing = [key for key in PolicySettings.model_fields if f"`{key}`" not in text]
    assert not missing


def test_the_manual_names_every_need() -> None:
    (told,) = [text for text in PAGES.with_name("extending.md").read_text().split("\n\n") if "Declared needs" in text]
    missing = [field.name for field in fields(Needs) if f"`{field.name}`" not in told]
    assert not missing


@pytest.mark.parametrize("name", algorithm_names())
def test_new_figures_replace_only_the_last_cells_of_the_overview(name: str) -> None:
    """Rows of algorithms without needs lost their empty cell, so the figures moved to other columns."""
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if line.startswith(f"| [{name}](")]
    figures = [cell.strip() for cell in row.split("|")[-3:-1]]
    assert measure_algorithms().with_figures(text, name, figures) == text
