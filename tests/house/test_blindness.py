"""Code of flows, workers, engines and algorithms never queries its mode.

Nothing outside schedule/ and runtime/ reads a field of `Schedule`. The fields are taken from the model itself, so new
fields are covered too.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from interlace.schedule.schedule import Schedule
from tests.house.source import PACKAGE, nodes, package_files, place

FIELDS = frozenset(Schedule.model_fields)
# A name of two words is the schedule's wherever it stands; one word (publish, dispatch) may be anyone's method.
DISTINCT = frozenset(name for name in FIELDS if "_" in name)
SEEING = ("schedule", "runtime", "stages", "rollouts", "forecast")
ENV_STAGE = PACKAGE / "robots" / "env_stage.py"
"""Stage of the role `env`: it reads the granule that the schedule sets."""
# These choose and show a schedule, whole; what they may not do is read a field.
CHOOSING = ("api", "cli", "run")
# Values that are words of their own elsewhere: how an engine treats its cache, what a batch is made of.
COMMON_VALUES = frozenset({"keep", "recompute", "step", "group", "sample", "none", "all", "hold", "drop", "offload"})
MODE_WORDS = frozenset({
    "sync", "async", "synchronous", "asynchronous", "colocated", "collocated", "disaggregated", "hybrid", "pipeline",
    "streaming", "on_policy", "off_policy", "one_step_off",
})  # fmt: skip


@cache
def mode_names() -> frozenset[str]:
    presets = {path.stem for path in (PACKAGE / "schedule" / "presets").glob("*.yaml")}
    values = {
        value
        for field in Schedule.model_fields.values()
        for value in (field.annotation, *get_args(field.annotation))
        for value in get_args(value)
        if isinstance(value, str)
    }
    return MODE_WORDS | presets | (values - COMMON_VALUES)


def schedule_reads(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that read a schedule's field: by attribute, by getattr, or by its name as a key."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            called_schedule = "schedule" in name_of(node.value).lower()
            if node.attr in DISTINCT or (called_schedule and node.attr in FIELDS):
                yield node, f".{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in DISTINCT:
            yield node, repr(node.value)


def name_of(node: ast.expr) -> str:
    """What an expression calls itself: the last name in `run.schedule`, `schedules[0]`, `load_schedule()`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def mode_comparisons(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    names = mode_names()
    for node in nodes:
        tested: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            tested = [node.value]
        constants = (inner for part in tested for inner in ast.walk(part) if isinstance(inner, ast.Constant))
        for constant in constants:
            if constant.value in names:
                yield node, repr(constant.value)


def imports_schedule(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    for node in nodes:
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(f"{name}.".startswith("interlace.schedule.") for name in named):
            yield node, "import of interlace.schedule"


def findings(paths: list[Path], search: object) -> list[str]:
    assert callable(search)
    return [f"{place(path, node)} {what}" for path in paths for node, what in search(nodes(path))]


def test_nothing_outside_reads_a_schedule_field() -> None:
    files = [path for path in package_files(outside=SEEING) if path != ENV_STAGE]
    assert not findings(files, schedule_reads)


def test_nothing_outside_compares_with_a_mode() -> None:
    assert not findings(package_files(outside=SEEING + CHOOSING), mode_comparisons)


def test_nothing_outside_imports_the_schedule() -> None:
    files = [path for path in package_files(outside=SEEING + CHOOSING) if path != ENV_STAGE]
    assert not findings(files, imports_schedule)


@pytest.mark.parametrize(
    ("search", "code"),
    [
        (schedule_reads, "if run.schedule.publish: pass"),
        (schedule_reads, "x = self._schedule.max_staleness"),
        (schedule_reads, "settings.max_staleness"),
        (schedule_reads, "getattr(settings, 'max_staleness')"),
        (mode_comparisons, "if mode == 'async': pass"),
        (mode_comparisons, "mode in ('drain', 'keep')"),
        (mode_comparisons, "match mode:\n    case 'rolling': pass"),
        (imports_schedule, "from interlace.schedule.schedule import Schedule"),
        (imports_schedule, "from interlace import schedule"),
    ],
)
def test_the_checks_see_what_they_look_for(search: object, code: str) -> None:
    assert callable(search)
    assert list(search(ast.walk(ast.parse(code))))


@pytest.mark.parametrize("code", ["run.publish(batch)", "optimizer.schedule.warmup", "engine.update(mode == 'keep')"])
def test_the_checks_leave_other_code_alone(code: str) -> None:
    for search in (schedule_reads, mode_comparisons, imports_schedule):
        assert not list(search(ast.walk(ast.parse(code))))
