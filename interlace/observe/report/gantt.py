"""Chart of the work on each device during one step, from timeline.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from interlace.observe.report.svg import RIGHT, Plot, label, nice_ticks
from interlace.observe.trace_events import DEVICE_PROCESS, RUN_PROCESS, TraceEvents

BIN_COLOURS: Mapping[str, Sequence[str]] = {
    "generate": ("#3b82f6",),
    "train": ("#1e3a8a", "#0f766e", "#4c1d95", "#6d28d9"),
    "inference": ("#22d3ee", "#67e8f9", "#a78bfa"),
    "score": ("#38bdf8",),
    "simulate": ("#16a34a",),
    "weight_sync": ("#ec4899", "#f472b6"),
    "switch": ("#f59e0b", "#fbbf24", "#d97706"),
}
"""Bin of the ledger -> colours of its operations, assigned in order of their names."""
OTHER = "#9ca3af"


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
    """Number of the device -> its name."""
    bars: Sequence[Bar]
    steps: Mapping[int, tuple[float, float]]
    """Step, counted from 1 -> times of its start and end, in seconds."""
    note: str = ""
    """Note on damaged lines; empty if there are none."""

    @cached_property
    def colours(self) -> Mapping[str, str]:
        """Returns the colour of each operation, by name."""
        names: dict[str, set[str]] = {}
        for bar in self.bars:
            names.setdefault(bar.bin, set()).add(bar.name)
        shades = {name: BIN_COLOURS.get(name, (OTHER,)) for name in names}
        return {
            name: shades[kind][place % len(shades[kind])]
            for kind, mine in names.items()
            for place, name in enumerate(sorted(mine))
        }

    @classmethod
    def read(cls, path: Path) -> "DeviceTimeline | None":
        """Reads a timeline; returns None if the run has not written it yet. Raises UserError if it is not a trace; see
        TraceEvents.
        """
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
        return cls(devices=names, bars=bars, steps=steps, note=read.note)


def gantt(name: str, timeline: DeviceTimeline, start_s: float, end_s: float) -> str:
    """Draws one row per device from start to end; seconds count from the start."""
    row = 30.0
    plot = Plot(width=1060.0, height=row * len(timeline.devices) + 44.0, left=64.0)
    x = plot.x_scale(0.0, end_s - start_s)
    bottom = plot.height - plot.bottom
    for tick in nice_ticks(0.0, end_s - start_s, 8):
        if tick <= end_s - start_s:
            plot.line(x(tick), 4, x(tick), bottom, "rule")
            plot.text(x(tick), bottom + 16, label(round(tick, 6)), "middle")
    for place, (device, text) in enumerate(sorted(timeline.devices.items())):
        top = 4 + place * row
        plot.parts.append(
            f'<rect class="track" x="{plot.left}" y="{top + 3}" width="{plot.width - plot.left - RIGHT}" '
            f'height="{row - 6}"/>'
        )
        plot.text(plot.left - 8, top + row / 2 + 4, text, "end")
        for bar in timeline.bars:
            if bar.device == device and bar.end_s > start_s and bar.start_s < end_s:
                low, high = max(bar.start_s, start_s) - start_s, min(bar.end_s, end_s) - start_s
                tip = f"{bar.name} ({bar.cause}): {(bar.end_s - bar.start_s) * 1e3:.1f} ms"
                plot.rect(x(low), top + 3, max(x(high) - x(low), 0.4), row - 6, timeline.colours[bar.name], tip)
    plot.x_title("seconds")
    return plot.render(name)


def legend_of(timeline: DeviceTimeline, start_s: float, end_s: float) -> Mapping[str, str]:
    """Returns the colours of the operations in the window, by name."""
    seen = {bar.name for bar in timeline.bars if bar.end_s > start_s and bar.start_s < end_s}
    return {name: timeline.colours[name] for name in sorted(seen)}
