"""The map of the code contains every folder, and only existing files and names."""

import ast
import re

import pytest

from tests.house.source import ROOT

MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`(interlace/[\w/.]+)(?::([\w.]+))?`", MAP)))


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_what_the_map_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body if name else []
    for part in name.split(".") if name else ():
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{path} has no {name}"
        body = getattr(found[0], "body", [])


def test_every_folder_is_on_the_map() -> None:
    folders = {path.parent.name for path in (ROOT / "interlace").glob("*/__init__.py")}
    on_the_map = set(re.findall(r"^\|.*\| `interlace/(\w+)/` \|", MAP, re.MULTILINE))
    assert folders == on_the_map
