"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("places", [("all", "all"), ("0-50%", "50-100%")], ids=["in turns", "side by side"])
def test_proposer_and_judge_both_learn(places: tuple[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "proposer_judge.py"), *places]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"step \d+: ([\d.]+) right at a mean gap of ([\d.]+)", result.stdout)
    shares, gaps = [float(share) for share, _ in found], [float(gap) for _, gap in found]
    assert len(found) == 3
    assert shares[-1] > 0.9 and shares[-1] > shares[0], "the judge tells what an untrained one guesses at"
    assert gaps[-1] < 0.15, "the proposer found what is hard: drawn evenly, gaps are 0.31 apart"


def test_the_flow_is_as_short_as_it_says() -> None:
    assert len((EXAMPLES / "proposer_judge.py").read_text(encoding="utf-8").splitlines()) < 80
