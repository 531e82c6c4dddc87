"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("devices", [("0", "0"), ("0", "1")], ids=["in turns", "side by side"])
def test_the_solver_learns_what_the_proposer_sets_it(devices: tuple[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "proposer_solver.py"), *devices]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    shares = [float(share) for share in re.findall(r"step \d+: ([\d.]+) right", result.stdout)]
    assert len(shares) == 3 and shares[-1] > 0.7
