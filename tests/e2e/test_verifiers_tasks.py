"""Environments of verifiers 0.4 run in a separate environment, because their packages conflict with ours."""

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("INTERLACE_VERIFIERS")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON is None, reason="INTERLACE_VERIFIERS names no Python with verifiers 0.4, uv, aiohttp, numpy and pyyaml"
)
def test_environments_of_verifiers_run_over_a_session() -> None:
    assert PYTHON
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"  # uv is installed beside it
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    script = Path(__file__).with_name("verifiers_tasks.py")
    ended = subprocess.run([PYTHON, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "all environments ran" in ended.stdout, ended.stdout + ended.stderr
