"""The reference pages are up to date, and every setting, public member and metric has a meaning."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from interlace.run.recipe.metric_names import METRICS
from tests.house.source import ROOT, nodes, package_files, place

REFERENCE = ROOT / "docs" / "reference"


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", REFERENCE / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def pages() -> dict[str, str]:
    return dict(script().pages())


@cache
def metrics() -> frozenset[str]:
    families = yaml.safe_load(METRICS.read_text(encoding="utf-8"))
    return frozenset(name for family in families for name in family["metrics"])


@cache
def literals() -> tuple[tuple[str, str], ...]:
    """Returns (place, text) of each string of the package; parts that are computed are written NAME."""
    return tuple(pair for path in package_files() for pair in literals_of(path))


def literals_of(path: Path) -> Iterator[tuple[str, str]]:
    inner = set()
    for node in nodes(path):
        match node:
            case ast.JoinedStr(values=values):
                inner.update(map(id, values))
                yield (
                    place(path, node),
                    "".join(str(p.value) if isinstance(p, ast.Constant) else "NAME" for p in values),
                )
            case ast.Constant(value=str(text)) if id(node) not in inner:
                yield place(path, node), text


def is_same(first: str, second: str) -> bool:
    """Returns whether one of two names is the other with its computed parts filled in."""
    return bool(pattern_of(first).fullmatch(second) or pattern_of(second).fullmatch(first))


@cache
def pattern_of(name: str) -> "re.Pattern[str]":
    """Returns the pattern of the names that a name with computed parts stands for."""
    return re.compile(re.escape(name).replace("NAME", r"[\w/]+").replace("PHASE", r"\w+"))


@pytest.mark.parametrize("name", ["settings.md", "metrics.md", "api.md"])
def test_the_page_is_up_to_date(name: str) -> None:
    text = (REFERENCE / name).read_text(encoding="utf-8")
    assert text == pages()[name], "run: python docs/reference/generate.py"


@pytest.mark.parametrize("name", ["settings.md", "metrics.md", "api.md"])
def test_every_row_has_a_meaning(name: str) -> None:
    empty = [line for line in pages()[name].splitlines() if line.startswith("| ") and line.endswith("|  |")]
    assert not empty, "write a docstring, or a line in docs/reference/names.yaml: " + "\n".join(empty)


def test_every_key_of_a_recipe_is_on_the_page() -> None:
    listed = set(re.findall(r"^\| \[?`([\w.]+)`", pages()["settings.md"], re.MULTILINE))
    keys = {f"{prefix}{name}" for prefix, name in _fields()}
    assert not keys - listed, f"not listed: {sorted(keys - listed)}"


def _fields() -> Iterator[tuple[str, str]]:
    generate = script()
    for config, section in ((generate.Recipe, ""), *generate.places().items()):
        for name in config.model_fields:
            if generate.CHOSEN.get(section) != name and name in config.__annotations__:
                yield f"{section}." if section else "", name


def test_every_metric_of_the_code_has_a_meaning() -> None:
    families = {name.partition("/")[0] for name in metrics() if "/" in name}
    places = {text: found for found, text in literals()}
    missing = [
        f"{found}: {text}"
        for text, found in places.items()
        if re.fullmatch(r"[a-z_]+(/\w+)+", text) and text.partition("/")[0] in families
        if text not in metrics() and not any(is_same(text, name) for name in metrics())
    ]
    assert not missing, "add them to interlace/observe/metrics.yaml: " + "\n".join(missing)


def test_every_documented_metric_is_in_the_code() -> None:
    texts = {text for _, text in literals()}
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    whole = {text for text in texts if "/" in text}
    gone = [
        name
        for name in metrics()
        if "NAME" not in name and name.rpartition("/")[2].removeprefix("num_") not in words
        if name not in whole and not any(is_same(name, text) for text in whole)
    ]
    assert not gone, f"remove from interlace/observe/metrics.yaml: {gone}"
