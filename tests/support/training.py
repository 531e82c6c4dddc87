"""Real training runs at toy size, through the same entry point as the command line."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from interlace.observe.progress import ProgressView, QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.session import TrainReport
from interlace.run.train import train

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    "steps=4",
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "warmup.steps=20",
    "warmup.until=null",
    "warmup.batch_size=16",
    "task.reasoning_gym.train_size=64",
    "task.reasoning_gym.heldout_size=8",
    "logging.loggers=[]",
    "algorithm.drop_zero_variance=false",
    # All answers are wrong at this size, but their lengths differ, so there is something to learn.
    "reward.shaping.length_weight=1",
    "cluster.devices=cpu:2",
)
TIMED = (
    "timing_s/",
    "perf/throughput",
    "perf/tokens_per_device_s",
    "perf/mfu",
    "perf/reward_call_s",
    "sched/bubble",
    "rollout/",
    "goodput/",
    "sched/in_flight",
    "sched/queued_max",
    "sched/oldest_wait_s",
    "perf/time_left_s",
    "memory/",
)


@cache
def _shared_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="interlace-cache-")


def shared_cache() -> str:
    """Returns the setting of a cache that all tests of this process share, so that each warm-up runs once."""
    return f"model.cache_dir={_shared_folder().name}"


class StopAfter(StopSignal):
    """Requests a stop once this many steps are logged."""

    def __init__(self, metrics: Path, steps: int | None) -> None:
        super().__init__(lambda: None)
        self._metrics, self._steps = metrics, steps

    @property
    def requested(self) -> bool:
        return self._steps is not None and len(self._metrics.read_text().splitlines()) >= self._steps


def run(
    root: Path,
    name: str,
    overrides: Sequence[str] = (),
    *,
    base: Sequence[str] = SMALL,
    resume: bool = False,
    stop_after: int | None = None,
    progress: ProgressView | None = None,
) -> TrainReport:
    settings = [*base, shared_cache(), *overrides]
    return run_recipe("quickstart", root, name, settings, resume=resume, stop_after=stop_after, progress=progress)


def run_recipe(
    recipe_name: str,
    root: Path,
    name: str,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    stop_after: int | None = None,
    progress: ProgressView | None = None,
) -> TrainReport:
    recipe = load_recipe(recipe_name, overrides)
    folder = RunFolder.resume(root, name) if resume else RunFolder.create(root, name)
    folder.write_config(recipe)
    stop = StopAfter(folder.metrics, stop_after)
    return train(recipe, folder, resume=resume, progress=progress or QuietProgress(), stop=stop)


@contextmanager
def killed_command(root: Path, overrides: Sequence[str], *, limit_s: float) -> Iterator[int]:
    """Trains `x` in runs/ by the command until its second step is saved, and kills the command after the block.

    Yields its process. limit_s: time limit of the training, in seconds.
    """
    given = [*SMALL, shared_cache(), *overrides, "steps=400"]
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()"]
    with (root / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "train", "quickstart", "--name", "x", *given],
            cwd=root, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    deadline_s = time.monotonic() + limit_s
    while not (root / "runs/x/checkpoints/step_2").exists():
        assert process.poll() is None and time.monotonic() < deadline_s, (root / "run.log").read_text()
        time.sleep(0.01)
    yield process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()


def metrics(root: Path, name: str) -> list[dict[str, float]]:
    """Returns the metrics of each step, without those that depend on the clock."""
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(TIMED)} for line in lines]


def samples(root: Path, name: str) -> list[dict[str, object]]:
    paths = sorted((root / name / "samples").glob("step_*.jsonl"))
    # Lines of bytes: a response may contain characters at which lines of text end, such as U+0085.
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def final_weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    newest = max((root / name / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return load_file(newest / "model.safetensors")


def equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
