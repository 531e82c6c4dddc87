"""Prose in the documents is at most 120 columns wide; tables, code and generated text have no limit."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 120
NOT_PROSE = ("|", "#", "<", "![", "    ")


def prose(text: str) -> list[tuple[int, str]]:
    """Lists lines with their numbers, without fenced code and blocks between `<!-- name -->` and `<!-- /name -->`."""
    found, is_code, is_made = [], False, False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif marker := re.fullmatch(r"<!-- (/?)\S+ -->", line):
            is_made = not marker[1]
        elif not is_code and not is_made and not line.startswith(NOT_PROSE):
            found.append((number, line))
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_prose_is_wrapped(page: Path) -> None:
    lines = prose(page.read_text(encoding="utf-8"))
    # A single long word, such as a formula in backquotes, may exceed the limit.
    wide = [f"{page.name}:{number}" for number, line in lines if len(line) > WIDTH and " " in line.strip("- ")[:WIDTH]]
    assert not wide, f"over {WIDTH} columns: {', '.join(wide)}"


def test_no_page_has_the_markers_of_a_merge() -> None:
    marked = [
        path.name for path in PAGES if re.search(r"^(<{7}|={7}|>{7})( |$)", path.read_text(encoding="utf-8"), re.M)
    ]
    assert not marked


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """`make docs` is strict: a page outside the navigation, or a link to a folder of the sources, is an error."""
    docs = ROOT / "docs"
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert not pages - listed, f"add them to nav in mkdocs.yml: {sorted(pages - listed)}"
    links = {
        (page, link)
        for page in pages
        for link in re.findall(
            r"\]\(((?:\.\./)+(?:interlace|examples|benchmarks)/[^)#]+)\)", (docs / page).read_text(encoding="utf-8")
        )
    }
    assert not [(page, link) for page, link in links if not (docs / page).parent.joinpath(link).resolve().is_file()]
