"""Imports follow the layers. The contracts in pyproject.toml run here with the tests."""

import graphlib
import subprocess
import sys

import grimp
import pytest

from tests.house.source import PACKAGE, ROOT

HEAVY = ("torch", "transformers", "ray")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_contracts_hold() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_import_cycles() -> None:
    """Imports for types and inside functions count as well."""
    graph = grimp.build_graph("interlace", exclude_type_checking_imports=False)
    edges = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_every_folder_has_a_layer() -> None:
    """A folder that no layer names would escape the contract."""
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    missing = [name for name in folders if f"interlace.{name}" not in contracts]
    assert not missing, f"folders without a layer in [tool.importlinter] of pyproject.toml: {missing}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run_python(f"import sys, interlace; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("folder", ["core", "schedule", "observe", "runtime", "forecast/costs", "forecast/search"])
def test_light_folders_import_without_heavy_libraries(folder: str) -> None:
    if not (PACKAGE / folder).is_dir():
        pytest.skip(f"there is no interlace/{folder}")
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.name != "__init__.py" and "ray" not in path.relative_to(PACKAGE).parts
    ]
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    try: importlib.import_module(module)\n"
        "    except ModuleNotFoundError as error:\n"  # an adapter to a package that is not installed
        "        if error.name.startswith('interlace'): raise\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert run_python(code) == "[]"
