"""What ran on each device during one step, from timeline.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.observe.report.svg import RIGHT, Plot, label, nice_ticks

DEVICE_PROCESS = 1
"""Number of the devices' tracks in the trace."""
OPERATION_COLOURS: Mapping[str, str] = {
    "rollout.serve": "#3b82f6",
    "actor.accumulate": "#1e3a8a",
    "actor.optimizer_step": "#0f766e",
    "critic.accumulate": "#4c1d95",
    "critic.optimizer_step": "#6d28d9",
    "critic.values": "#a78bfa",
    "reference.logprobs": "#22d3ee",
    "actor.logprobs": "#67e8f9",
    "export_weights": "#ec4899",
    "update_weights": "#f472b6",
    "onload": "#f59e0b",
    "offload": "#fbbf24",
}
OTHER = "#9ca3af"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """An operation on a device. Times are seconds."""

    device: int
    name: str
    start_s: float
    end_s: float
    cause: str

    @property
    def colour(self) -> str:
        """By role and operation, else by operation."""
        operation = self.name.partition(".")[2]
        return OPERATION_COLOURS.get(self.name) or OPERATION_COLOURS.get(operation, OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTimeline:
    """The device tracks of a trace."""

    devices: Mapping[int, str]
    """Number -> name."""
    bars: Sequence[Bar]

    @classmethod
    def read(cls, path: Path) -> "DeviceTimeline | None":
        """None where the run has not written it yet."""
        if not path.exists():
            return None
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no Chrome trace ({error}); remove it to report without a Gantt chart."
            ) from None
        tracks = [event for event in events if event["pid"] == DEVICE_PROCESS]
        names = {event["tid"]: event["args"]["name"] for event in tracks if event["name"] == "thread_name"}
        bars = [
            Bar(
                device=event["tid"],
                name=event["name"],
                start_s=event["ts"] / 1e6,
                end_s=(event["ts"] + event["dur"]) / 1e6,
                cause=event["args"]["cause"],
            )
            for event in tracks
            if event["ph"] == "X"
        ]
        return cls(devices=names, bars=bars)

    def end_of(self, step: int) -> float | None:
        """When the trainer was done with a step (the first is 1); None where it is not in the trace."""
        cause = f"step {step - 1}"
        return max((bar.end_s for bar in self.bars if bar.cause == cause), default=None)

    def steps(self) -> list[int]:
        """Those that were trained in the trace."""
        causes = {bar.cause for bar in self.bars if bar.cause.startswith("step ")}
        return sorted(int(cause.removeprefix("step ")) + 1 for cause in causes)


def gantt(name: str, timeline: DeviceTimeline, start_s: float, end_s: float) -> str:
    """A row a device from start to end; seconds count from the start."""
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
                plot.rect(x(low), top + 3, max(x(high) - x(low), 0.4), row - 6, bar.colour, tip)
    plot.x_title("seconds")
    return plot.render(name)


def legend_of(timeline: DeviceTimeline, start_s: float, end_s: float) -> Mapping[str, str]:
    """Operation -> colour of what is in the window."""
    seen = (bar for bar in timeline.bars if bar.end_s > start_s and bar.start_s < end_s)
    return dict(sorted({bar.name: bar.colour for bar in seen}.items()))
