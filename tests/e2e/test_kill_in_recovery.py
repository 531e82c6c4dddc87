"""A command that is killed while it recovers from another fault leaves nothing behind, and its run resumes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from interlace.run.chaos.real import role_processes
from tests.support.processes import all_gone, descendants, handles
from tests.support.training import SMALL, equal_weights, final_weights, metrics, samples, shared_cache

SETTINGS = (
    *SMALL,
    "steps=5",
    "checkpoint_every=2",
    "warmup=null",
    "evaluation.num_prompts=1",
    "reward.workers=1",
    "actor.ranks=2",
    "recovery.memory_checkpoint_every=1",
)
MEMORY = Path("/dev/shm")
ENDED_S = 20.0
"""Seconds for the processes of a killed command to end. A rank that is constructed has server.ALONE_S."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MEMORY.is_dir(), reason="shared memory is a folder on Linux alone"),
]


def start(root: Path, name: str, *options: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from interlace.cli.main import app; app()", "train", "quickstart", "--name", name]
    return subprocess.Popen(
        [*program, *options, *SETTINGS, shared_cache()],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"},
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with the run `whole`, which has no fault."""
    root = tmp_path_factory.mktemp("whole")
    finish(start(root, "whole"))
    return root / "runs"


def read_to(process: subprocess.Popen[str], text: str) -> None:
    """Reads the output of a command up to a line that contains a text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def kill_rank(process: subprocess.Popen[str]) -> Sequence[int]:
    ranks = role_processes("actor", of=process.pid)
    os.kill(ranks[-1], signal.SIGKILL)
    read_to(process, "The run starts again from its newest checkpoint")
    return ranks


def kill_rank_and_wait_for_new_ones(process: subprocess.Popen[str]) -> None:
    before = kill_rank(process)
    while not {*role_processes("actor", of=process.pid)} - {*before}:
        assert process.poll() is None
        time.sleep(0.005)


def stop_rank(process: subprocess.Popen[str]) -> None:
    os.kill(role_processes("actor", of=process.pid)[-1], signal.SIGSTOP)


def kill_reward(process: subprocess.Popen[str]) -> None:
    os.kill(role_processes("reward", of=process.pid)[-1], signal.SIGKILL)


def open_handles(process: subprocess.Popen[str]) -> Sequence[int]:
    """Returns a handle of each process below a command, of which some are ending."""
    while True:
        try:
            return handles(descendants(process.pid)[1:])
        except (FileNotFoundError, ProcessLookupError):
            time.sleep(0.01)


@pytest.mark.parametrize("fault", [kill_rank, kill_rank_and_wait_for_new_ones, stop_rank, kill_reward])
def test_a_command_that_is_killed_in_a_recovery_leaves_nothing_and_resumes(
    whole: Path, tmp_path: Path, fault: Callable[[subprocess.Popen[str]], object]
) -> None:
    process = start(tmp_path, "killed")
    read_to(process, "step 3/")
    fault(process)
    process.send_signal(signal.SIGSTOP)  # it starts no further process
    left = open_handles(process)
    process.kill()
    process.communicate()
    assert all_gone(left, ENDED_S)
    assert not [*MEMORY.glob(f"*interlace-{process.pid}-*")]
    for handle in left:
        os.close(handle)
    finish(start(tmp_path, "killed", "--resume"))
    assert metrics(tmp_path / "runs", "killed") == metrics(whole, "whole")
    assert samples(tmp_path / "runs", "killed") == samples(whole, "whole")
    assert equal_weights(final_weights(tmp_path / "runs", "killed"), final_weights(whole, "whole"))
