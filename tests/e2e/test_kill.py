"""A killed run resumes from its checkpoint with the same results as an uninterrupted run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.training import SMALL, equal_weights, final_weights, metrics, samples

STEPS = ["steps=12", "checkpoint_every=2"]


def start(root: Path, name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "train", "quickstart", "--name", name]
    return subprocess.Popen(
        [*command, *options, *SMALL, f"model.cache_dir={root / 'cache'}", *STEPS],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    finish(start(tmp_path, "whole"))
    killed = start(tmp_path, "killed")
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 5/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert 4 <= len(metrics(tmp_path / "runs", "killed")) < 12
    finish(start(tmp_path, "killed", "--resume"))
    assert metrics(tmp_path / "runs", "killed") == metrics(tmp_path / "runs", "whole")
    assert samples(tmp_path / "runs", "killed") == samples(tmp_path / "runs", "whole")
    weights = [final_weights(tmp_path / "runs", name) for name in ("killed", "whole")]
    assert equal_weights(*weights)
