"""timeline.json: the run as a Chrome trace, which Perfetto opens, also while the run goes on.

The format is that of the Trace Event Format document (JSON array form, whose closing bracket may be missing): a track
a device, a track a worker rank, a track of steps; an arrow from where a group's last sample was generated to where the
group is trained on; counters. Events are written at step boundaries: the file grows with the run, memory does not.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from interlace.core.types import JSON, FinishReason, Request, Sample
from interlace.runtime.goodput import OPERATIONS
from interlace.runtime.timeline import Records, Served, Span, StepRecord
from interlace.schedule.placement import Device

RUN_PROCESS, DEVICE_PROCESS, WORKER_PROCESS = 1, 2, 3
"""Numbers of the groups of tracks."""
MAX_ORIGINS = 1 << 16
"""Groups whose generation is remembered for an arrow; those that were dropped are never asked for."""
Event = dict[str, JSON]


class TraceFile:
    """A recorder that writes."""

    def __init__(self, path: Path, devices: Sequence[Device]) -> None:
        """Replaces a file of that name."""
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._separator = ""
        self._tracks = _Tracks()
        self._arrows = _Arrows()
        self._write(_process_names())
        for device in devices:
            self._write(self._tracks.reserve(DEVICE_PROCESS, device.name, device.index))
        self._write(self._tracks.reserve(RUN_PROCESS, "steps", 0))
        self._devices = tuple(devices)

    def keep(self, records: Records) -> None:
        """Appends what ended."""
        finished = {served.span: _finished(served) for served in records.served}
        for span in sorted(records.spans, key=lambda span: span.start_s):
            self._write(self._span(span, span.end_s, finished.get(span, ())))
        for served in records.served:
            self._arrows.generated(served, self._tracks.place_of(served.span))
            self._write(_counters(served))
        # After what was generated, some of which the same stretch trains on.
        for span in records.spans:
            self._write(self._arrows.to(span, self._tracks.place_of(span)))
        for step in records.steps:
            self._write(_step(step))
        self._tracks.forget_places()
        self._file.flush()

    def close(self, records: Records) -> None:
        """Appends the rest. What never ended is drawn until now, and says so."""
        self.keep(records)
        for span in records.running:
            self._write(self._span(span, records.end_s))
        self._file.write("\n]\n")
        self._file.close()

    def _span(self, span: Span, end_s: float, finished: Sequence[JSON] = ()) -> Iterator[Event]:
        start_us, end_us = _us(span.start_s), _us(end_s)
        event: Event = {
            "ph": "X",
            "name": f"{span.role}.{span.operation}",
            "cat": span.role,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "args": _arguments(span) | ({"finished": finished} if finished else {}),
        }
        for device in span.devices:
            names, track = self._tracks.lane(DEVICE_PROCESS, self._devices[device].name, start_us, end_us)
            yield from names
            yield {**event, "pid": DEVICE_PROCESS, "tid": track}
        names, track = self._tracks.lane(WORKER_PROCESS, f"{span.group} rank {span.rank}", start_us, end_us)
        yield from names
        self._tracks.remember(span, track)
        yield {**event, "pid": WORKER_PROCESS, "tid": track}

    def _write(self, events: "Iterator[Event] | Sequence[Event]") -> None:
        for event in events:
            self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
            self._separator = ",\n"


class _Tracks:
    """Numbers of tracks. Operations of one rank that overlap go to lanes of their own: slices of a track may not."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self._next = 1000
        self._places: dict[Span, int] = {}

    def reserve(self, process: int, name: str, number: int) -> list[Event]:
        """A track with a number of its own choice."""
        self._lanes[process, name] = [(number, 0.0)]
        return [_thread_name(process, number, name)]

    def lane(self, process: int, name: str, start_us: float, end_us: float) -> tuple[list[Event], int]:
        """The first lane that is free then: (what names it, where it is new; its number)."""
        lanes = self._lanes.setdefault((process, name), [])
        for place, (number, reach_us) in enumerate(lanes):
            if reach_us <= start_us:
                lanes[place] = (number, end_us)
                return [], number
        self._next += 1
        lanes.append((self._next, end_us))
        shown = name if len(lanes) == 1 else f"{name}, lane {len(lanes)}"
        return [_thread_name(process, self._next, shown)], self._next

    def remember(self, span: Span, track: int) -> None:
        """Where a span was drawn."""
        self._places[span] = track

    def place_of(self, span: Span) -> int | None:
        """The worker track of a span of this stretch; None where it is of another."""
        return self._places.get(span)

    def forget_places(self) -> None:
        """The stretch is over."""
        self._places.clear()


class _Arrows:
    """From the call that finished a group's last sample to the first operation of each role that trains on it."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[int, float]] = {}
        self._number = 0

    def generated(self, served: Served, track: int | None) -> None:
        """Remembers where groups come from."""
        span = served.span
        if track is None:
            return
        inside_us = max(_us(span.start_s), _us(span.end_s) - 1.0)
        for response in served.responses:
            key = response.completion.request.key
            if response.completion.finish_reason != FinishReason.ABORTED and key.gid >= 0 and key.index >= 0:
                self._origins[key.gid] = (track, inside_us)
        while len(self._origins) > MAX_ORIGINS:
            del self._origins[next(iter(self._origins))]

    def to(self, span: Span, track: int | None) -> Iterator[Event]:
        """The arrows that end at a span; none unless it trains."""
        if OPERATIONS.get(span.operation) != "train" or track is None:
            return
        for gid in dict.fromkeys(sample.key.gid for sample in span.given if isinstance(sample, Sample)):
            if origin := self._origins.get(gid):
                self._number += 1
                base: Event = {"name": "trained on", "cat": "sample", "id": self._number, "pid": WORKER_PROCESS}
                yield {**base, "ph": "s", "tid": origin[0], "ts": origin[1], "args": {"group": gid}}
                yield {**base, "ph": "f", "bp": "e", "tid": track, "ts": _us(span.start_s)}


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond: the same instant is the same number wherever it stands."""
    return round(seconds * 1e6, 3)


def _arguments(span: Span) -> dict[str, JSON]:
    found: dict[str, JSON] = {"cause": span.cause or span.operation, "step": span.step, "version": span.version}
    if span.end_s == float("inf"):
        found["unfinished"] = True
    if names := names_of(span.given):
        found["samples"] = names
    return found


def _finished(served: Served) -> list[JSON]:
    """[group, sample, response tokens, finish reason] of each sample of the flow that the call finished."""
    return [
        [request.key.gid, request.key.index, len(done.token_ids), str(done.finish_reason)]
        for done in (response.completion for response in served.responses)
        if (request := done.request).key.gid >= 0 and done.finish_reason != FinishReason.ABORTED
    ]


def names_of(given: Sequence[object]) -> list[JSON]:
    """`uid [indices]` of each group, samples of no group (an evaluation's) by their uid."""
    groups: dict[str, list[int]] = {}
    for item in given:
        if isinstance(item, Sample):
            groups.setdefault(item.prompt.uid, []).append(item.key.index)
        elif isinstance(item, Request):
            groups.setdefault(item.uid, []).append(item.sample_index)
    return [f"{uid} [{','.join(map(str, indices))}]" for uid, indices in groups.items()]


def _counters(served: Served) -> Iterator[Event]:
    """As the call began, and after it."""
    span = served.span
    moments = (
        (span.start_s, served.batch, served.num_queued, served.kv_use),
        (span.end_s, served.num_running, served.num_queued, served.kv_use if served.num_running else 0.0),
    )
    for at_s, num_running, num_queued, kv_use in moments:
        yield _counter(f"running sequences {span.group}", at_s, num_running)
        yield _counter(f"queued requests {span.group}", at_s, num_queued)
        yield _counter(f"KV use {span.group}", at_s, round(kv_use, 4))


def _step(step: StepRecord) -> Iterator[Event]:
    start_us = _us(step.start_s)
    yield {
        "ph": "X",
        "name": f"step {step.step}",
        "cat": "step",
        "pid": RUN_PROCESS,
        "tid": 0,
        "ts": start_us,
        "dur": round(_us(step.end_s) - start_us, 3),
        "args": {"step": step.step},
    }
    for name, value in step.counts.items():
        yield _counter(name, step.end_s, value)


def _counter(name: str, at_s: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": RUN_PROCESS, "tid": 0, "ts": _us(at_s), "args": {"value": value}}


def _thread_name(process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _process_names() -> Iterator[Event]:
    for process, name in ((RUN_PROCESS, "run"), (DEVICE_PROCESS, "devices"), (WORKER_PROCESS, "workers")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
