"""Loads the scripts that measure presets and algorithms as modules, because docs/ is not a package."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def measure_presets() -> ModuleType:
    return _load_script("presets")


def measure_algorithms() -> ModuleType:
    return _load_script("algorithms")


@cache
def _load_script(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"measure_{folder}", DOCS / folder / "measure.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
