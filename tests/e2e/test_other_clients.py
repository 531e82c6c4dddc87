"""Clients of other projects work unmodified, in the environment of the Python that INTERLACE_CLIENTS names."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("INTERLACE_CLIENTS", "")


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON,
    reason="INTERLACE_CLIENTS names no Python with openai-agents, langchain-openai, anthropic, verifiers, aiohttp",
)
def test_other_clients_are_served() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "e2e" / "other_clients.py")],
        capture_output=True, text=True, timeout=180, check=False, env=environment,
    )  # fmt: skip
    assert done.stdout.strip().endswith("all were served"), done.stderr
