"""Loads the script that measures the presets as a module, because docs/ is not a package."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "docs" / "presets" / "measure.py"


@cache
def measure_presets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_presets", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
