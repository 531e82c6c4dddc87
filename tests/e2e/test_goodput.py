"""The ledger of real runs, and its presentations, are correct."""

import json
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from interlace.observe.goodput import BINS
from interlace.observe.headline import REWARD, Headline
from interlace.observe.progress import QuietProgress
from interlace.schedule.presets import preset_names
from tests.support.ledgers import check_books
from tests.support.training import run

COMPUTING = [name for name in BINS if name not in ("startup", "idle", "lock_wait", "tail_bubble", "pipeline_bubble")]
STAT = Path("/proc/stat")
QUICK = ("verl-colocated", "areal", "rlinf-hybrid", "async-colocated")
"""Presets that every run of the tests trains under; the others are slow only because they are many."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in preset_names()]
)
def test_every_device_second_of_a_real_run_is_in_one_bin(root: Path, schedule: str) -> None:
    report = run(root, schedule, [f"schedule={schedule}"])
    check_books(root / schedule, report)
    rows = [json.loads(line) for line in (root / schedule / "metrics.jsonl").read_text().splitlines()]
    assert all(row["goodput/train"] > 0 and row["goodput/trained_tokens_per_device_s"] > 0 for row in rows)
    assert any(row["goodput/generate"] > 0 for row in rows)
    steps_s = 2 * sum(row["timing_s/step"] for row in rows)
    assert report.ledger.total_s > steps_s
    assert report.ledger.seconds["startup"] > 0
    parts = report.ledger.total_s - report.ledger.seconds["startup"] - report.ledger.seconds["idle"]
    if not any(row["sched/staleness_max"] for row in rows):
        assert parts <= steps_s + 1e-6, "between the steps nothing but logging goes on"


class CpuSeconds(QuietProgress):
    """Notes how many CPU seconds this process and all others had used at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        super().step(step, metrics, headline)
        own_s = time.process_time()
        self.seen.append((own_s, read_busy_s() - own_s))


def read_busy_s() -> float:
    """Returns the CPU seconds that all processes, interrupts and other virtual machines have used since the start."""
    user, nice, system, _, _, *interrupts_and_steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / os.sysconf("SC_CLK_TCK")


def test_a_trainer_of_one_thread_is_booked_on_one_of_its_two_devices(root: Path) -> None:
    run(root, "one-thread", ("cluster.threads_per_worker=1",))
    rows = [json.loads(line) for line in (root / "one-thread" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["goodput/train"] <= 0.5 for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(
    not STAT.exists(), reason="the system does not count the CPU seconds of all processes in /proc/stat"
)
@pytest.mark.parametrize(("devices", "threads"), [("cpu:1", "null"), ("cpu:2", "1"), ("cpu:2", "null")])
def test_the_ledger_books_the_device_seconds_that_were_computed(root: Path, devices: str, threads: str) -> None:
    cpu, name = CpuSeconds(), f"booked-{devices[-1]}-{threads}"
    sizes = ("steps=8", "prompts_per_step=16", f"cluster.devices={devices}", f"cluster.threads_per_worker={threads}")
    run(root, name, sizes, progress=cpu)
    rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    shares = [sum(row[f"goodput/{name}"] for name in COMPUTING) for row in rows]
    booked = [share * row["timing_s/step"] * int(devices[-1]) for share, row in zip(shares, rows, strict=True)]
    spent = [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(cpu.seen)]
    # Work of other processes, such as another test, makes a step last longer than it computes.
    assert min(seconds / own for seconds, (own, _) in zip(booked[1:], spent, strict=True)) > 0.6
    assert min((seconds - others) / own for seconds, (own, others) in zip(booked[1:], spent, strict=True)) < 1.3
