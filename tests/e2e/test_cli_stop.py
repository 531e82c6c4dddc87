"""Ctrl-C or SIGTERM on a real process: it ends at a step boundary, with a checkpoint, and says how to go on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "steps=100000",
    "prompts_per_step=2",
    "samples_per_prompt=2",
    "warmup=null",
    "task.reasoning_gym.train_size=16",
    "task.reasoning_gym.heldout_size=0",
    "algorithm.drop_zero_variance=false",
    "cluster.devices=cpu:1",
    "logging.loggers=[]",
)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "train", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "cluster"), [(signal.SIGINT, "local"), (signal.SIGTERM, "local"), (signal.SIGTERM, "ray")]
)
def test_a_signal_stops_it_at_a_step_boundary_and_the_run_can_go_on(
    tmp_path: Path, sent: signal.Signals, cluster: str
) -> None:
    with start(tmp_path, "quickstart", *SMALL, f"cluster.backend={cluster}") as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "the run ended by itself"
        process.send_signal(sent)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "Stopping at the end of this step" in rest
    run = tmp_path / "runs" / "quickstart"
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"Stopped after step {done} of 100000." in rest
    assert (run / "checkpoints" / f"step_{done}").is_dir()
    assert "interlace train runs/quickstart/config.yaml --name quickstart --resume" in rest
    again = ["runs/quickstart/config.yaml", "--name", "quickstart", "--resume", f"steps={done + 1}"]
    with start(tmp_path, *again) as resumed:
        assert resumed.stdout is not None
        output = resumed.stdout.read()
    assert resumed.returncode == 0, output
    assert len((run / "metrics.jsonl").read_text().splitlines()) == done + 1


@pytest.mark.slow
def test_a_signal_to_all_its_processes_leaves_the_ranks_to_end_the_step(tmp_path: Path) -> None:
    reward = "cluster.devices=cpu:2", "actor.ranks=2", "reward.workers=2"
    with start(tmp_path, "quickstart", *SMALL, *reward) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "the run ended by itself"
        os.killpg(process.pid, signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    run = tmp_path / "runs" / "quickstart"
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert (run / "checkpoints" / f"step_{done}").is_dir()


@pytest.mark.slow
def test_a_run_whose_own_ray_is_dead_ends_without_waiting_for_it(tmp_path: Path) -> None:
    """SIGTERM to all processes of a run may reach Ray's first."""
    with start(tmp_path, "quickstart", *SMALL, "cluster.backend=ray") as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "the run ended by itself"
        os.kill(child(process.pid, "gcs_server"), signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "Stopped after step" in rest


def child(process: int, name: str) -> int:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    children = [number for found in lists for number in found.read_text().split()]
    return next(int(number) for number in children if name in Path(f"/proc/{number}/comm").read_text())
