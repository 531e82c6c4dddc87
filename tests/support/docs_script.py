"""The script that measures the presets, loaded as a module because docs/ is not a package."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

PAGES = Path(__file__).parents[2] / "docs" / "presets"


@cache
def measure_presets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_presets", PAGES / "measure.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
