"""A killed run resumes from its checkpoint with the same results as an uninterrupted run."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.run.chaos.real import role_processes
from tests.support.processes import all_gone, handles
from tests.support.training import SMALL, equal_weights, final_weights, metrics, samples, shared_cache

STEPS = ["steps=12", "checkpoint_every=2"]


def start(root: Path, name: str, *options: str, command: str = "train") -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from interlace.cli.main import app; app()", command, "quickstart", "--name", name]
    return subprocess.Popen(
        [*program, *options, *SMALL, shared_cache(), *STEPS],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def process_ids(root: Path) -> set[int]:
    """Ids of the processes that train in a folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().split(b"\0")
            if (path / "cwd").readlink() == root and b"train" in command:
                found.add(int(path.name))
    return found


@pytest.mark.slow  # starts three commands
def test_a_supervised_run_that_is_killed_continues_to_the_same_weights(tmp_path: Path) -> None:
    finish(start(tmp_path, "whole"))
    supervised = start(tmp_path, "killed", "--restarts", "1", command="supervise")
    assert supervised.stdout is not None
    output = []
    for line in supervised.stdout:
        output.append(line)
        if line.startswith("step 5/"):
            [process] = process_ids(tmp_path)
            os.kill(process, signal.SIGKILL)
            break
    rest, _ = supervised.communicate(timeout=240)
    assert supervised.returncode == 0, "".join(output) + rest
    assert re.search(r"killed by SIGKILL\. It continues after step \d; 0 further starts are left\.", rest), rest
    assert metrics(tmp_path / "runs", "killed") == metrics(tmp_path / "runs", "whole")
    assert equal_weights(*[final_weights(tmp_path / "runs", name) for name in ("killed", "whole")])


@pytest.mark.slow  # two ranks that import torch
def test_a_killed_command_leaves_no_folder(tmp_path: Path) -> None:
    killed = start(tmp_path, "killed", "actor.ranks=2", "steps=12")
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 3/"):
            break
    ranks = handles(role_processes("actor", killed.pid))
    memory = [*Path("/dev/shm").glob(f"interlace-{killed.pid}-*")]
    assert len(ranks) == 2 and len(memory) == 1
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert all_gone(ranks, 60.0)
    assert not memory[0].exists()
    assert not [*Path(tempfile.gettempdir()).glob(f"interlace-mail-{killed.pid}-*")]


def train_here(*options: str) -> None:
    """Trains in this process, into runs/ of its folder."""
    done = CliRunner().invoke(app, ["train", "quickstart", *options, *SMALL, shared_cache(), *STEPS])
    assert done.exit_code == 0, done.output


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_here("--name", "whole")
    killed = start(tmp_path, "killed")
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 5/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert 4 <= len(metrics(tmp_path / "runs", "killed")) < 12
    train_here("--name", "killed", "--resume")
    assert metrics(tmp_path / "runs", "killed") == metrics(tmp_path / "runs", "whole")
    assert samples(tmp_path / "runs", "killed") == samples(tmp_path / "runs", "whole")
    weights = [final_weights(tmp_path / "runs", name) for name in ("killed", "whole")]
    assert equal_weights(*weights)
