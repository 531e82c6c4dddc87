"""Reader of a run's operations from its timeline.json, which may still be incomplete."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError
from interlace.observe.trace_events import DEVICE_PROCESS, RUN_PROCESS, WORKER_PROCESS, TraceEvents
from interlace.runtime.timeline import Span, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One operation of one rank."""

    span: Span
    """Time span of the operation. Its devices are only counted: their numbers are placeholders."""
    args: Mapping[str, Any]
    """Other arguments of the operation in the trace."""

    @property
    def seconds(self) -> float:
        """Duration of the operation."""
        return self.span.end_s - self.span.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTrace:
    """Operations and steps of a trace, in order of time."""

    slices: Sequence[Slice]
    steps: Sequence[StepRecord]
    note: str = ""
    """Note on damaged lines, or empty."""

    def of(self, role: str, *operations: str, after_step: int = 0) -> list[Slice]:
        """Returns a role's operations of these names, in training steps after `after_step`."""
        return [
            each
            for each in self.slices
            if each.span.role == role and each.span.operation in operations and each.span.step > after_step
        ]


def read_trace(path: Path) -> ReadTrace:
    """Reads a trace. Raises UserError if the file does not exist; see TraceEvents."""
    if not path.is_file():
        raise UserError(f"there is no {path}: the run was made with logging.timeline=false. Measure with a recipe.")
    read = TraceEvents.read(path)
    events = read.events
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    work = [event for event in events if event["ph"] in ("X", "b")]
    # A device's slice does not name its rank, so devices are divided among equal operations that started together.
    devices = Counter((event["name"], event["ts"]) for event in work if event["pid"] == DEVICE_PROCESS)
    ranks = Counter((event["name"], event["ts"]) for event in work if event["pid"] == WORKER_PROCESS)
    slices = [
        _make_slice(event, track, devices[when] // ranks[when], ends)
        for event in work
        if event["pid"] == WORKER_PROCESS
        and (track := tracks.get((event["pid"], event["tid"])))
        and (when := (event["name"], event["ts"]))
    ]
    steps = [
        StepRecord(step=e["args"]["step"], start_s=e["ts"] / 1e6, end_s=(e["ts"] + e["dur"]) / 1e6, counts={})
        for e in work
        if e["pid"] == RUN_PROCESS
    ]
    return ReadTrace(slices=slices, steps=steps, note=read.note)


def _make_slice(event: Mapping[str, Any], track: str, num_devices: int, ends: Mapping[int, float]) -> Slice:
    group, _, rank = track.partition(" rank ")
    end_us = event["ts"] + event["dur"] if event["ph"] == "X" else ends.get(event["id"], event["ts"])
    args = event["args"]
    span = Span(
        start_s=event["ts"] / 1e6,
        end_s=end_us / 1e6,
        devices=tuple(range(num_devices)),
        group=group,
        rank=int(rank or 0),
        operation=event["name"].partition(".")[2],
        cause=args.get("cause", ""),
        step=args["step"],
        version=args.get("version", 0),
        bin=args.get("bin"),
    )
    return Slice(span=span, args=args)
