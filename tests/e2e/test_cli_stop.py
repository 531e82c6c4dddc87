"""Ctrl-C or SIGTERM ends a real process at a step boundary, with a checkpoint and instructions to resume."""

import hashlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import all_gone, descendants, handles, named

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
@pytest.mark.parametrize(
    ("function", "workers", "sent"),
    [
        ("stuck", 2, signal.SIGTERM),
        ("stuck", 0, signal.SIGINT),
        ("stuck_judge", 2, signal.SIGTERM),
        ("stubborn_judge", 2, signal.SIGINT),
    ],
)
def test_a_signal_ends_a_step_that_does_not_end_and_the_run_goes_on_as_if_there_had_been_none(
    tmp_path: Path, function: str, workers: int, sent: signal.Signals
) -> None:
    reward = (
        f"reward.name=tests.support.reward_functions:{function}", f"reward.workers={workers}", "reward.timeout_s=1000",
        "reward.tag=null", "reward.answer_format=text",
    )  # fmt: skip
    with start(tmp_path, "quickstart", *SMALL, *reward) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "the run ended by itself"
        (tmp_path / "stuck").touch()
        assert quiet(process), "the reward did not get stuck"
        process.send_signal(sent)
        start_s = time.monotonic()
        rest = process.stdout.read()
        took_s = time.monotonic() - start_s
    assert process.returncode == 0, rest
    assert took_s < 10, rest
    assert "Traceback" not in rest
    (tmp_path / "stuck").unlink()
    run = tmp_path / "runs" / "quickstart"
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"Stopped after step {done} of 100000." in rest
    for name, args in (
        ("quickstart", ("runs/quickstart/config.yaml", "--resume")),
        ("other", ("quickstart", *SMALL, *reward)),
    ):
        with start(tmp_path, *args, "--name", name, f"steps={done + 2}") as again:
            assert again.stdout is not None
            output = again.stdout.read()
        assert again.returncode == 0, output
    assert trained(run, done + 2) == trained(tmp_path / "runs" / "other", done + 2)


def quiet(process: subprocess.Popen[str]) -> bool:
    """Reads lines until there was none for two seconds, longer than a step takes. False where the run ended."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    while select.select([descriptor], [], [], 2.0)[0]:
        if not os.read(descriptor, 1 << 16):
            return False
    return True


def trained(run: Path, step: int) -> str:
    """A digest of the weights after a step."""
    weights = run / "checkpoints" / f"step_{step}" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


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
        os.kill(named(process.pid, "gcs_server")[0], signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "Stopped after step" in rest


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("killed", ["raylet", "driver"])
def test_of_a_ray_that_was_started_for_a_run_nothing_stays(tmp_path: Path, killed: str) -> None:
    once = "recovery.restarts_per_hour={trainer: 0}"  # else the run starts another Ray and continues
    with start(tmp_path, "quickstart", *SMALL, "cluster.backend=ray", once) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "the run ended by itself"
        raylet = named(process.pid, "raylet")[0]
        left = handles(descendants(raylet))
        os.kill(raylet if killed == "raylet" else process.pid, signal.SIGKILL)
        rest = process.stdout.read() if killed == "raylet" else ""
    if killed == "raylet":
        assert process.returncode == 1
        assert f"Ray's raylet (process {raylet}) is gone" in rest
    deadline_s = time.monotonic() + 10
    assert all_gone(left, within_s=10), "a process of Ray is left"
    for handle in left:
        os.close(handle)
    while folders := list(Path("/dev/shm").glob(f"interlace-{process.pid}-*")):
        assert time.monotonic() < deadline_s, folders
        time.sleep(0.05)
