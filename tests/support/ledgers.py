"""Checks of a finished run's ledger against the run's other files."""

import json
from pathlib import Path

import pytest

from interlace.core.yaml_text import parse_yaml
from interlace.observe.goodput import BINS, PREFIX
from interlace.observe.run_folder import RunFolder
from interlace.run.session import TrainReport
from tests.support.chrome_trace import Event, check_trace, events_of, tracks_of

TOLERANCE = 1e-3
"""Share of the device time: 0.1 %."""


def check_books(folder: Path, report: TrainReport) -> None:
    """Checks that the bins add up to all device time, and that busy time equals the timeline's."""
    run = RunFolder(path=folder)
    schedule = parse_yaml(run.config.read_text())["schedule"]
    runs_ahead = schedule["max_staleness"] > 0 or schedule["sync_every"] > 1
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    events = events_of(run.timeline)
    check_trace(events)
    devices = tracks_of(events, "devices")
    steps = {e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "step"}
    assert list(steps) == [row["step"] for row in rows]
    for row in rows:
        shares = {name: row[PREFIX + name] for name in BINS}
        assert min(shares.values()) >= 0 and sum(shares.values()) == pytest.approx(1, abs=TOLERANCE)
        low, high = steps[row["step"]]
        assert row["timing_s/step"] * 1e6 == pytest.approx(high - low, rel=TOLERANCE)
        waiting = sum(shares[name] for name in ("lock_wait", "tool_wait", "tail_bubble", "pipeline_bubble"))
        # A device that waits for state, and one that runs an `idle` operation, are in a bin but not both busy.
        assert waiting - TOLERANCE <= row["sched/bubble"] <= waiting + shares["idle"] + shares["switch"] + TOLERANCE
        busy = sum(_busy(events, track, low, high) for track in devices) / (len(devices) * (high - low))
        assert busy <= 1 - row["sched/bubble"] + TOLERANCE
        if not runs_ahead:
            # Otherwise operations continue after the step, and the start of an operation is known only at its end.
            assert busy >= 1 - row["sched/bubble"] - TOLERANCE
    booked_us, last_us = report.ledger.total_s / len(devices) * 1e6, max(high for _, high in steps.values())
    assert last_us <= booked_us + 1, "every second up to the end of the last step"
    assert report.ledger.seconds["startup"] / len(devices) * 1e6 == pytest.approx(min(low for low, _ in steps.values()))


def _busy(events: list[Event], track: int, low: float, high: float) -> float:
    """Returns the microseconds of a window in which a device's track has a slice. Slices must not overlap."""
    process = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "devices")
    mine = (e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, track))
    return sum(max(0.0, min(e["ts"] + e["dur"], high) - max(e["ts"], low)) for e in mine)
