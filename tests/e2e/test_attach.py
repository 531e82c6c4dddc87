"""A running job is traced from outside, on every cluster, and goes on."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.observe.live import is_supported
from interlace.observe.run_folder import RunFolder
from tests.support.training import SMALL

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no SIGUSR1")
DEADLINE_S = 240
ROOT = Path(__file__).parents[2]


class Job:
    """`interlace train` as a process of its own, without end."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.folder = RunFolder(path=root / "runs" / "job")
        settings = [*SMALL, f"model.cache_dir={root / 'cache'}", "steps=100000", *overrides]
        self.log = root / "job.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*interlace(), "train", "quickstart", "--name", "job", *settings],
                cwd=root,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            )

    def until(self, path: Path) -> Path:
        """Waits for a file or folder."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not path.exists() or (path.is_file() and not path.stat().st_size):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)
        return path

    def end(self) -> str:
        """Ctrl-C; what it printed."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(DEADLINE_S)
        return self.log.read_text()


def interlace() -> list[str]:
    return [sys.executable, "-c", "from interlace.cli.main import app; app()"]


def attach(root: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*interlace(), "profile", "--attach", "job", *options],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def operations(path: Path) -> dict[str, int]:
    """torch operations of a trace file, by thread."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            name = names.get(event["tid"], "?")
            found[name] = found.get(name, 0) + 1
    return found


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    started = Job(tmp_path, *request.param)
    yield started
    started.process.kill()
    started.process.wait()


def num_steps(job: Job) -> int:
    return len(job.folder.metrics.read_text().splitlines())


@pytest.mark.parametrize("job", [["schedule=areal"]], indirect=True)
def test_an_asynchronous_run_is_traced_and_goes_on(job: Job, tmp_path: Path) -> None:
    job.until(job.folder.metrics)
    done = attach(tmp_path, "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    [path] = [Path(line) for line in done.stdout.splitlines() if line.endswith(".json.gz")]
    assert path == Path("runs/job/profile/1/controller.json.gz")
    by_thread = operations(tmp_path / path)
    assert sum(by_thread.values()) > 0
    for group in ("rollout/0", "actor/0"):
        assert any(group in thread for thread in by_thread), by_thread

    # By hand, as the documentation says: one signal starts, the next one stops.
    steps_before = num_steps(job)
    pid = json.loads(job.folder.process.read_text())["pid"]
    os.kill(pid, signal.SIGUSR1)
    job.until(job.folder.traces / ".2")
    refused = attach(tmp_path, "--seconds", "1")
    assert refused.returncode == 2 and f"kill -USR1 {pid}" in refused.stderr
    os.kill(pid, signal.SIGUSR1)
    job.until(job.folder.traces / "2")
    assert operations(job.folder.traces / "2" / "controller.json.gz")

    printed = job.end()
    assert job.process.returncode == 0, printed
    assert "profile: 1 traces in runs/job/profile/2" in printed
    assert num_steps(job) > steps_before, "the run went on"
    assert not job.folder.process.exists()
    gone = attach(tmp_path)
    assert gone.returncode == 2 and "run 'job' is not running" in gone.stderr


@pytest.mark.ray
@pytest.mark.parametrize("job", [["schedule=areal", "cluster=ray"]], indirect=True)
def test_every_process_of_a_ray_run_has_a_trace(job: Job, tmp_path: Path) -> None:
    job.until(job.folder.metrics)
    done = attach(tmp_path, "--seconds", "2")
    assert done.returncode == 0, done.stderr
    written = {Path(line).name: tmp_path / line for line in done.stdout.splitlines() if line.endswith(".json.gz")}
    processes = ("actor-0-rank-0", "controller", "reward-rank-0", "rollout-0-rank-0")
    assert sorted(written) == [f"{process}.json.gz" for process in processes]
    assert operations(written["rollout-0-rank-0.json.gz"]) and operations(written["actor-0-rank-0.json.gz"])
    printed = job.end()
    assert job.process.returncode == 0, printed


@pytest.mark.parametrize("job", [["cluster.devices=cpu:1"]], indirect=True)
def test_a_killed_run_is_not_mistaken_for_a_running_one(job: Job, tmp_path: Path) -> None:
    job.until(job.folder.process)
    job.process.kill()
    job.process.wait()
    done = attach(tmp_path)
    assert done.returncode == 2 and "ended without removing" in done.stderr and "--resume" in done.stderr
