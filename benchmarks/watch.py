"""Cost of `interlace watch` for a run: step times with and without a watched page, in turn, on the same machine.

    python benchmarks/watch.py [--steps 240] [--period 10] [--json watch.json]

One run of the quick start trains. A server and a client that asks as often as the page are stopped and continued every
`--period` seconds, or more until two steps count, so both halves see the same weights, lengths and machine. A step
counts if no change happened in it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import cast

from interlace.observe.jsonl import Row, read_whole_rows

CLI = [sys.executable, "-c", "from interlace.cli.main import app; app()"]
EVERY_S = 2.0
"""Time between two requests of the page."""
FEWEST_STEPS = 2
"""Steps that count in each half. The error of a median needs two."""


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--period", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={options.steps}", "eval_every=0", "warmup.steps=60", "warmup.until=null"]
        train = subprocess.Popen([*CLI, "train", "quickstart", *settings, "--name", "run", "--quiet"], cwd=folder)
        try:
            watched, alone, share = measure(train, Path(folder) / "runs" / "run", options.period)
        finally:
            train.kill()
            train.wait()
    one, other = statistics.median(watched), statistics.median(alone)
    print(f"steps with a watched page: {len(watched)}, median {one:.4f} s")
    print(f"steps without:             {len(alone)}, median {other:.4f} s")
    print(f"difference: {one / other - 1:+.2%}; standard error {error(watched, alone):.2%}")
    print(f"CPU time of the server while it served: {share:.2%} of one core")
    if options.json:
        options.json.write_text(json.dumps({"watched_s": watched, "alone_s": alone, "server_cpu_share": share}))


def measure(train: "subprocess.Popen[bytes]", run: Path, period_s: float) -> tuple[list[float], list[float], float]:
    """Returns the step times in seconds with and without a page, and the server's CPU seconds per second."""
    while not (run / "metrics.jsonl").exists() and train.poll() is None:
        time.sleep(0.2)
    server = subprocess.Popen([*CLI, "watch", str(run), "--port=0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    url = server.stdout.readline().split()[-1]
    times: dict[bool, list[float]] = {True: [], False: []}
    served_s, before_s = 0.0, cpu_seconds(server.pid)
    is_watched = True
    try:
        while train.poll() is None:
            os.kill(server.pid, signal.SIGCONT if is_watched else signal.SIGSTOP)
            first, began_s = len(read_whole_rows(run / "metrics.jsonl")), time.monotonic()
            rows: list[Row] = []
            while (time.monotonic() - began_s < period_s or len(rows) < FEWEST_STEPS) and train.poll() is None:
                if is_watched:
                    urllib.request.urlopen(f"{url}/content", timeout=60).read()
                time.sleep(EVERY_S)
                rows = read_whole_rows(run / "metrics.jsonl")[first + 1 : -1]
            times[is_watched] += [cast(float, row["timing_s/step"]) for row in rows]
            served_s += is_watched * (time.monotonic() - began_s)
            is_watched = not is_watched
        share = (cpu_seconds(server.pid) - before_s) / served_s
    finally:
        server.kill()
        server.wait()
    return times[True], times[False], share


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def error(one: list[float], other: list[float]) -> float:
    """Returns the standard error of the difference of two medians, as a share of the second."""
    squares = [statistics.variance(times) / len(times) for times in (one, other)]
    return 1.25 * sum(squares) ** 0.5 / statistics.median(other)


if __name__ == "__main__":
    main()
