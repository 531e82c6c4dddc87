"""Runs of a sweep that are spread over a Ray cluster: one fails, one is killed, and a resumption finishes it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_nodes import ray_node

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).parents[2]
REWARDS = """
def score(response):
    return float("1" in response)

def fail(response):
    raise ValueError("no verifier today")
"""
SETTINGS = [
    "quickstart", "steps=30", "warmup=null", "prompts_per_step=2", "samples_per_prompt=2", "checkpoint_every=1",
    "task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=2", "logging.loggers=[]",
    "reward={workers: 0, tag: null}",
    "reward.name=judge:score,judge:fail", "cluster=ray", "cluster.devices=cpu:1",
]  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of the processes that join a Ray cluster of two cores; RAY_ADDRESS is its address."""
    with ray_node() as variables:
        yield {**os.environ, **variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


def test_a_failed_and_a_killed_run_do_not_stop_the_sweep(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "judge.py").write_text(REWARDS)
    address = f"cluster.address={environment['RAY_ADDRESS']}"
    sweep = [sys.executable, "-m", "interlace", "sweep", *SETTINGS, address, "--parallel", "2", "--name", "both"]
    started = subprocess.Popen(sweep, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "runs" / "both"
    while not (begun := [path.parents[1] for path in runs.glob("*judge-score*/checkpoints/step_*")]):
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    run = begun[0]
    os.kill(json.loads((run / "process.json").read_text())["pid"], signal.SIGKILL)
    errors = started.communicate()[1]
    assert started.returncode == 1 and f"run {run.name} failed: the process was killed by SIGKILL" in errors
    assert "no verifier today" in errors
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert 1 <= done < 30

    resumed = subprocess.run(
        [*sweep, "--resume", "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 1 and "SIGKILL" not in resumed.stderr, resumed.stderr
    told = json.loads(resumed.stdout)
    assert [(row["name"], row["steps"]) for row in told["runs"]] == [(run.name, 30)]
    assert len(told["failed"]) == 1 and Path(tmp_path, told["report"]).is_file()
