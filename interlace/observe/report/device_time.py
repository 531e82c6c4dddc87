"""Device time on a page: the goodput ledger, its share of each step, and the operations of one step by device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from interlace.observe.goodput import BINS, PREFIX, ledger_of
from interlace.observe.report.panels import Curve, Panel
from interlace.observe.report.sample_times import SampleTimes
from interlace.observe.run_data import RunData
from interlace.observe.trace_events import DEVICE_PROCESS, RUN_PROCESS, TraceEvents

BIN_COLOURS: Mapping[str, str] = dict(
    zip(
        BINS,
        (
            "#1e3a8a", "#3b82f6", "#fbbf24", "#16a34a", "#7dd3fc", "#22d3ee", "#f97316", "#ef4444",
            "#ec4899", "#a855f7", "#f9a8d4", "#64748b", "#8d99ae", "#c3ccd9", "#57534e", "#e3e7ee",
        ),
        strict=True,
    )
)  # fmt: skip
"""Useful work in blues and green, waste that keeps a device busy in warm colours, waiting in greys."""
OPERATION_COLOURS: Mapping[str, Sequence[str]] = {
    "generate": ("#3b82f6",),
    "train": ("#1e3a8a", "#0f766e", "#4c1d95", "#6d28d9"),
    "inference": ("#22d3ee", "#67e8f9", "#a78bfa"),
    "score": ("#38bdf8",),
    "simulate": ("#16a34a",),
    "weight_sync": ("#ec4899", "#f472b6"),
    "switch": ("#f59e0b", "#fbbf24", "#d97706"),
}
"""Bin of the ledger -> colours of its operations, assigned in turn by name."""
OTHER = "#9ca3af"
SMALLEST_SHARE = 0.001
"""A bin with a smaller share of the device time is not listed."""
MAX_BARS = 60
"""Number of bars. A bar of a longer run is the mean of neighbouring steps."""
AFTER_STEP = 0.15
"""Part of the next step that is shown after the chosen one, as a share of its length."""
STEP_NAMES = ("middle", "slowest", "first", "last")
"""Names of steps that a reader of a page can choose, in addition to their numbers."""
StepChoice: TypeAlias = int | str | None
"""A step: its number or one of STEP_NAMES; None takes the middle one."""
SMALLEST_GAP = 0.0005
"""Operations of one kind with a smaller gap between them, as a share of the window, are drawn as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BinShare:
    """A bin of the ledger."""

    name: str
    colour: str
    share: float
    device_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerView:
    """The ledger of a run."""

    run: str
    sentence: str
    bins: Sequence[BinShare]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """An operation on a device. Times are seconds."""

    device: int
    name: str
    start_s: float
    end_s: float
    cause: str
    bin: str = ""
    """Bin of the goodput ledger."""


@dataclass(frozen=True, kw_only=True)
class DeviceTimeline:
    """The device tracks of a trace."""

    devices: Mapping[int, str]
    """Number -> name."""
    bars: Sequence[Bar]
    steps: Mapping[int, tuple[float, float]]
    """Step, the first is 1 -> its start and end."""
    samples: SampleTimes = field(default_factory=SampleTimes)
    note: str = ""
    """Note on damaged lines; empty if there are none."""

    @cached_property
    def colours(self) -> Mapping[str, str]:
        """Name of an operation -> colour."""
        names: dict[str, set[str]] = {}
        for bar in self.bars:
            names.setdefault(bar.bin, set()).add(bar.name)
        shades = {name: OPERATION_COLOURS.get(name, (OTHER,)) for name in names}
        return {
            name: shades[kind][place % len(shades[kind])]
            for kind, operations in names.items()
            for place, name in enumerate(sorted(operations))
        }

    @classmethod
    def read(cls, path: Path) -> "DeviceTimeline | None":
        """Reads timeline.json; returns None if it does not exist yet. Raises UserError if it is not a trace."""
        if not path.exists():
            return None
        read = TraceEvents.read(path)
        tracks = [event for event in read.events if event["pid"] == DEVICE_PROCESS]
        names = {event["tid"]: event["args"]["name"] for event in tracks if event["name"] == "thread_name"}
        bars = [
            Bar(
                device=event["tid"],
                name=event["name"],
                start_s=event["ts"] / 1e6,
                end_s=(event["ts"] + event["dur"]) / 1e6,
                cause=event["args"].get("cause", ""),
                bin=event["args"].get("bin", ""),
            )
            for event in tracks
            if event["ph"] == "X"
        ]
        steps = {
            event["args"]["step"]: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in read.events
            if event["pid"] == RUN_PROCESS and event["ph"] == "X"
        }
        return cls(devices=names, bars=bars, steps=steps, samples=SampleTimes.read(read.events), note=read.note)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBar:
    """An operation in the picture of a step."""

    left: float
    """Percent of the window."""
    width: float
    """Percent of the window."""
    colour: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTotal:
    """Time of an operation on a device during the shown step."""

    device: str
    name: str
    colour: str
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """The operations of one step."""

    run: str
    step: int
    seconds: float
    """Length of the window: the step and the beginning of the next."""
    step_end: float
    """Percent of the window."""
    note: str
    lanes: Mapping[str, Sequence[DrawnBar]]
    """Device -> its operations."""
    totals: Sequence[OperationTotal]
    legend: Mapping[str, str]
    """Operation -> colour."""


def ledger_view(run: RunData) -> LedgerView:
    """Sums the ledger of all steps."""
    ledger = ledger_of(run.rows)
    waste = ledger.largest_waste()
    bins = [
        BinShare(name=name, colour=BIN_COLOURS[name], share=ledger.fraction(name), device_seconds=seconds)
        for name, seconds in ledger.seconds.items()
        if ledger.fraction(name) >= SMALLEST_SHARE
    ]
    return LedgerView(run=run.name, sentence=waste.sentence if waste else "No device time was wasted.", bins=bins)


def step_bars(id_: str, run: RunData) -> Panel | None:
    """Builds the panel with the ledger of each step, in seconds; returns None without the time of a step."""
    rows = [row for row in run.rows if isinstance(row.get("timing_s/step"), int | float)]
    size = math.ceil(len(rows) / MAX_BARS) or 1
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    if not chunks:
        return None
    smallest = SMALLEST_SHARE * sum(_read_seconds(row, "timing_s/step") for row in rows) / size
    curves = []
    for name in BINS:
        values = [
            sum(_read_seconds(row, f"{PREFIX}{name}") * _read_seconds(row, "timing_s/step") for row in chunk)
            / len(chunk)
            for chunk in chunks
        ]
        total = sum(values)
        if total > 0 and total >= smallest:
            curves.append(Curve(label=name, colour=BIN_COLOURS[name], dash=0, values=values))
    note = "seconds of each step, mean over the devices" + (f"; a bar is the mean of {size} steps" if size > 1 else "")
    steps = [_read_seconds(chunk[0], "step") for chunk in chunks]
    return Panel(id=id_, title=f"{run.name}: time of each step", note=note, kind="stack", steps=steps, curves=curves)


def _read_seconds(row: Mapping[str, object], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def choose_step(timeline: DeviceTimeline, choice: StepChoice) -> int | None:
    """Returns the number of the step that a page shows in detail. None if the trace lacks it."""
    present = sorted(timeline.steps)
    if isinstance(choice, int):
        return choice if choice in timeline.steps else None
    if not present:
        return None
    match choice:
        case "first":
            return present[0]
        case "last":
            return present[-1]
        case "slowest":
            return max(present, key=lambda step: timeline.steps[step][1] - timeline.steps[step][0])
        case _:
            return present[len(present) // 2]


def step_view(run: str, timeline: DeviceTimeline, step: StepChoice) -> StepView | None:
    """Builds the picture of a step. Returns None if the trace lacks the step."""
    chosen = choose_step(timeline, step)
    if chosen is None:
        return None
    start_s, end_s = timeline.steps[chosen]
    last_s = end_s + AFTER_STEP * (end_s - start_s)
    window = max(last_s - start_s, 1e-9)
    bars = [bar for bar in timeline.bars if bar.end_s > start_s and bar.start_s < last_s]
    lanes = {
        name: _draw_bars([bar for bar in bars if bar.device == device], timeline, start_s, last_s)
        for device, name in sorted(timeline.devices.items())
    }
    return StepView(
        run=run,
        step=chosen,
        seconds=window,
        step_end=100 * (end_s - start_s) / window,
        note=timeline.note,
        lanes=lanes,
        totals=_sum_operations([bar for bar in bars if bar.start_s < end_s], timeline, start_s, end_s),
        legend={name: timeline.colours[name] for name in sorted({bar.name for bar in bars})},
    )


def _draw_bars(bars: Sequence[Bar], timeline: DeviceTimeline, start_s: float, end_s: float) -> list[DrawnBar]:
    window = max(end_s - start_s, 1e-9)
    joined: list[tuple[Bar, float, float, int]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if joined:
            first, low, high, count = joined[-1]
            if (first.name, first.cause) == (bar.name, bar.cause) and bar.start_s - high < SMALLEST_GAP * window:
                joined[-1] = (first, low, max(high, bar.end_s), count + 1)
                continue
        joined.append((bar, bar.start_s, bar.end_s, 1))
    drawn = []
    for bar, low, high, count in joined:
        left, right = max(low, start_s) - start_s, min(high, end_s) - start_s
        several = f"{count} times, " if count > 1 else ""
        text = f"{bar.name} ({bar.cause}): {several}{(high - low) * 1e3:.1f} ms"
        width = 100 * (right - left) / window
        drawn.append(DrawnBar(left=100 * left / window, width=width, colour=timeline.colours[bar.name], text=text))
    return drawn


def _sum_operations(
    bars: Sequence[Bar], timeline: DeviceTimeline, start_s: float, end_s: float
) -> list[OperationTotal]:
    grouped: dict[tuple[int, str], list[float]] = {}
    for bar in bars:
        grouped.setdefault((bar.device, bar.name), []).append(min(bar.end_s, end_s) - max(bar.start_s, start_s))
    return [
        OperationTotal(
            device=timeline.devices.get(device, str(device)),
            name=name,
            colour=timeline.colours[name],
            count=len(seconds),
            seconds=sum(seconds),
        )
        for (device, name), seconds in sorted(grouped.items())
    ]
