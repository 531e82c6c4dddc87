"""Each test that docs/failures.md names exists, and each of its rows has a thread and a test."""

import re

from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "failure |" not in line]


def test_every_row_has_a_thread_and_a_test_that_exists() -> None:
    assert len(ROWS) == 15
    for row in ROWS:
        assert re.search(r"\(https://github\.com/[\w.-]+/[\w.-]+/issues/\d+\)", row), row
        [(path, name)] = re.findall(r"`(tests/[a-z_0-9/]+\.py)::([a-z_0-9]+)`", row)
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)
