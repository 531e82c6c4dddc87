"""Whatever a reward function does, the run goes on: what it does to a sample costs that sample alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "steps=2", "prompts_per_step=4", "samples_per_prompt=4", "minibatches=1", "warmup=null",
    "task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=0", "algorithm.drop_zero_variance=false",
    "algorithm.refill_rounds=0", "cluster.devices=cpu:1", "logging.loggers=[]", "reward.tag=null",
    "reward.answer_format=text", "reward.timeout_s=1", "cluster.hang_after_s=60",
)  # fmt: skip


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from interlace.cli.main import app; app()",
        "train",
        "quickstart",
        "--name",
        "run",
    ]
    return subprocess.Popen(
        [*command, *SMALL, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reward(name: str, workers: int = 2) -> tuple[str, str]:
    return f"reward.name=tests.support.faulty_rewards:{name}", f"reward.workers={workers}"


@pytest.mark.parametrize(
    ("name", "workers", "reason"),
    [
        ("raises", 2, "ZeroDivisionError"),
        ("raises", 0, "ZeroDivisionError"),
        ("raises_ctrl_c", 2, "KeyboardInterrupt"),
        ("raises_ctrl_c", 0, "KeyboardInterrupt"),
        ("recurses", 2, "RecursionError"),
        ("gives_nan", 2, "no finite float32"),
        ("gives_too_much", 2, "no finite float32"),
        ("gives_none", 2, "returned None"),
        ("gives_a_list", 2, "is not a number"),
        ("exits", 2, "ended its process (exit code 7)"),
        ("crashes", 2, "ended its process (exit code -11)"),
        ("asks", 2, "EOFError"),
        ("hangs", 2, "timed out after 1 s"),
        ("hangs", 0, "timed out after 1 s"),
        ("never_returns", 8, "timed out after 1 s"),
        ("blocks", 8, "blocked its event loop"),
        ("swallows", 8, "timed out after 1 s"),
        ("gives_text", 2, ""),
        ("prints", 2, ""),
        ("names_parts_at_length", 2, ""),
        ("leaves_a_thread", 2, ""),
    ],
)
def test_a_fault_costs_its_sample_alone(tmp_path: Path, name: str, workers: int, reason: str) -> None:
    output, _ = (process := start(tmp_path, *reward(name, workers))).communicate(timeout=200)
    assert process.returncode == 0, output[-3000:]
    files = sorted((tmp_path / "runs" / "run" / "samples").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    failed = [str(row["reason"]) for row in rows if row["event"] == "failed"]
    assert len(failed) < len(rows)
    assert bool(failed) == bool(reason)
    assert all(reason in why for why in failed), failed


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_that_does_not_end(tmp_path: Path, sent: signal.Signals) -> None:
    heldout = "task.reasoning_gym.heldout_size=8", "reward.timeout_s=1000"
    with start(tmp_path, *reward("hangs"), *heldout) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("evaluation before 0/1"):
            assert line, "the run ended by itself"
        process.send_signal(sent)
        start_s = time.monotonic()
        rest = process.stdout.read()
        took_s = time.monotonic() - start_s
    assert took_s < 10, rest
    assert process.returncode == 1, rest
    assert "stopped before there was anything to save" in rest and "Traceback" not in rest
