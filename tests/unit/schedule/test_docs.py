"""Each preset has a page that agrees with its file, and generated parts of the documents are up to date."""

import re
from types import ModuleType

import pytest
import yaml

from interlace.schedule.presets import preset_names, preset_path
from tests.support.docs_script import PAGES, measure_presets

DOCS = PAGES.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return measure_presets()


def test_every_preset_has_a_page_and_every_page_a_preset() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_the_page_says_what_the_file_says(name: str) -> None:
    page, file = (PAGES / f"{name}.md").read_text(encoding="utf-8"), preset_path(name).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.+)` \| (.+) \|$", page, re.MULTILINE)
    assert {field: yaml.safe_load(value) for field, value, _ in rows} == yaml.safe_load(file)
    assert f"`interlace/schedule/presets/{name}.yaml`" in page
    source = re.search(r"# Source: (\S+)", file)
    assert source is None or source[1] in page


@pytest.mark.parametrize("name", [*preset_names(), "../schedules"])
def test_what_is_generated_is_up_to_date(script: ModuleType, name: str) -> None:
    path = (PAGES / f"{name}.md").resolve()
    stale = "run: python docs/presets/measure.py pages"
    assert path.read_text(encoding="utf-8") == script.rendered(path), stale


@pytest.mark.parametrize("name", preset_names())
def test_the_overview_leads_to_every_page(name: str) -> None:
    assert f"(presets/{name}.md)" in (DOCS / "schedules.md").read_text(encoding="utf-8")
