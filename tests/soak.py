"""Soak test: an asynchronous run with killed processes; reports memory, open files, threads and shared memory.

Run with `make test-soak SOAK_ARGS="--minutes 120"`. Exits with 1 if a count grows or something is left at the end.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.run.chaos.real import role_processes
from tests.support.processes import descendants
from tests.support.training import SMALL

LOOK_S = 2.0
END_S = 120.0
"""Seconds for the run to end after SIGINT."""
GROWTH = {"memory_mib": 1.15, "files": 1.1, "threads": 1.1, "shm_entries": 1.5}
"""Largest ratio of the last quarter's median to the second quarter's."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources of the run's main process, and entries in /dev/shm."""

    memory_mib: float
    files: float
    threads: float
    shm_entries: float


def count_entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def usage_of(process: int) -> Usage:
    resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(
        memory_mib=resident / 2**20,
        files=count_entries(f"/proc/{process}/fd"),
        threads=count_entries(f"/proc/{process}/task"),
        shm_entries=count_entries("/dev/shm"),
    )


def start(folder: Path) -> subprocess.Popen[bytes]:
    settings = [each for each in SMALL if not each.startswith("steps=")]
    settings += [f"model.cache_dir={folder / 'cache'}", "steps=10000000", "reward.workers=2", "schedule=areal"]
    command = [sys.executable, "-c", "from interlace.cli.main import app; app()", "train", "quickstart", *settings]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([*command, "--name", "soak", "--quiet"], cwd=folder, env=environment)


def watch(run: subprocess.Popen[bytes], minutes: float, kill_every_s: float) -> tuple[list[Usage], int]:
    """Watches the run and kills scoring processes. Returns the usage at each look and the number of kills."""
    draw, found, num_killed = random.Random(0), [], 0
    end_s, kill_s = time.monotonic() + 60 * minutes, time.monotonic() + kill_every_s
    while time.monotonic() < end_s and run.poll() is None:
        time.sleep(LOOK_S)
        found.append(usage_of(run.pid))
        targets = role_processes("reward", run.pid) if time.monotonic() >= kill_s else []
        if targets:
            os.kill(draw.choice(targets), draw.choice([signal.SIGKILL, signal.SIGSTOP]))
            num_killed, kill_s = num_killed + 1, time.monotonic() + kill_every_s
    return found, num_killed


def grown(found: Sequence[Usage]) -> list[str]:
    """Returns a sentence for each resource; those that grew too much begin with FAIL."""
    quarter = max(1, len(found) // 4)
    lines = []
    for name, limit in GROWTH.items():
        early = statistics.median(getattr(each, name) for each in found[quarter : 2 * quarter] or found)
        late = statistics.median(getattr(each, name) for each in found[-quarter:])
        verdict = "ok  " if late <= max(limit * early, early + 4) else "FAIL"
        lines.append(f"{verdict}  {name}: {early:.0f} in the second quarter, {late:.0f} in the last")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds between two faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interlace-soak-") as folder:
        run = start(Path(folder))
        metrics = Path(folder) / "runs/soak/metrics.jsonl"
        while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(LOOK_S)
        found, num_killed = watch(run, options.minutes, options.kill_every)
        below = descendants(run.pid)[1:]
        run.send_signal(signal.SIGINT)
        code = run.wait(END_S)
        rows = metrics.read_text().splitlines()
    time.sleep(LOOK_S)
    left = [each for each in below if Path(f"/proc/{each}").exists()]
    lines = grown(found)
    lines.append(f"{'ok  ' if code == 0 else 'FAIL'}  exit code {code}")
    lines.append(f"{'FAIL' if left else 'ok  '}  {len(left)} processes left")
    print(f"{len(rows)} steps, {num_killed} processes killed or stopped, {len(found)} looks")
    print("\n".join(lines))
    return int(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
