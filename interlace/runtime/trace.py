"""timeline.json: the run as a Chrome trace. Perfetto opens it, even while the run continues.

The format is the JSON array form of the Trace Event Format, whose closing bracket may be missing. It has one track per
device, one per worker rank, one of steps, and counters. An arrow leads from the generation of a group's last sample to
its training. Operations of a rank that overlap (concurrently scored rewards) are asynchronous events next to its track.
All is written at step boundaries: the file grows with the run, memory does not.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TextIO

from interlace.core.row import SampleLabel
from interlace.core.types import JSON
from interlace.observe.trace_events import DEVICE_PROCESS, RUN_PROCESS, WORKER_PROCESS
from interlace.runtime.timeline import EngineCall, Records, Span, StepRecord
from interlace.schedule.placement import Device

MAX_ORIGINS = 1 << 16
"""Number of groups whose generation is remembered for an arrow. Dropped groups are never looked up."""


class TraceFile:
    """A recorder that writes a trace file."""

    def __init__(self, path: Path, devices: Sequence[Device]) -> None:
        """Opens the file; replaces an existing one."""
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._devices = tuple(devices)
        self._lines: list[str] = []
        self._num_beside = 0
        self._tracks = _Tracks(self._lines)
        self._arrows = _Arrows(self._lines)
        self._counters = _Counters(self._lines)
        for process, name in ((RUN_PROCESS, "run"), (DEVICE_PROCESS, "devices"), (WORKER_PROCESS, "workers")):
            _write_name(self._lines, "process_name", process, 0, name)
        for device in devices:
            self._tracks.reserve(DEVICE_PROCESS, device.name, device.index)
        self._tracks.reserve(RUN_PROCESS, "steps", 0)
        self._file.write("[\n" + self._text())

    def keep(self, records: Records) -> None:
        """Appends the operations and steps that ended."""
        self._append_records(records)
        if text := self._text():
            self._file.write(",\n" + text)
            self._file.flush()

    def close(self, records: Records) -> None:
        """Appends the rest. Spans that never ended are drawn until now and marked as unfinished."""
        self._append_records(records)
        for span in records.running:
            self._draw_span(span, records.end_s)
        text = self._text()
        self._file.write(f",\n{text}\n]\n" if text else "\n]\n")
        self._file.close()

    def _append_records(self, records: Records) -> None:
        calls = {served.span: served for served in records.served}
        tracks = {
            span: self._draw_span(span, span.end_s, calls.get(span))
            for span in sorted(records.spans, key=attrgetter("start_s"))
        }
        for span in (served.span for served in records.served):
            if span.finished_groups and span in tracks:
                self._arrows.add_generation(span, tracks[span])
        for served in records.served:
            self._counters.count_call(served)
        # After the generated samples, because the same stretch may train on some of them.
        for span, track in tracks.items():
            self._arrows.end_at(span, track)
        for step in records.steps:
            self._write_step(step)

    def _draw_span(self, span: Span, end_s: float, call: EngineCall | None = None) -> "_Track":
        """Draws a span.

        Returns its worker's track; only there, the event lists the samples that the operation was given.
        """
        when = _to_microseconds(span.start_s), _to_microseconds(end_s)
        what, worker = _make_heads(span.group, span.rank, span.operation)
        arguments = f'"cause":{_quote_text(span.cause or span.operation)},"step":{span.step},"version":{span.version}'
        if span.bin:
            arguments += f',"bin":"{span.bin}"'
        if span.end_s == math.inf:
            arguments += ',"unfinished":true'
        for device in span.devices:
            self._write_slice(self._tracks[DEVICE_PROCESS, self._devices[device].name], what, when, arguments)
        track = self._tracks[WORKER_PROCESS, worker]
        if call:
            arguments += _describe_work(call)
        if span.samples:
            arguments += f',"samples":{json.dumps(_names_of(span.samples))}'
        self._write_slice(track, what, when, arguments)
        return track

    def _write_slice(self, track: "_Track", what: str, when: tuple[float, float], arguments: str) -> None:
        start_us, end_us = when
        if track.reach_us <= start_us:
            track.reach_us = end_us
            text = f'"ts":{start_us},"dur":{round(end_us - start_us, 3)}'
            self._lines.append(f'{{"ph":"X",{what},{track.place},{text},"args":{{{arguments}}}}}')
        else:
            self._num_beside += 1
            what = f'{what},{track.place},"id":{self._num_beside}'
            self._lines.append(
                f'{{"ph":"b",{what},"ts":{start_us},"args":{{{arguments}}}}},\n{{"ph":"e",{what},"ts":{end_us}}}'
            )

    def _write_step(self, step: StepRecord) -> None:
        start_us, end_us = _to_microseconds(step.start_s), _to_microseconds(step.end_s)
        self._lines.append(
            f'{{"ph":"X","name":"step {step.step}","cat":"step","pid":{RUN_PROCESS},"tid":0,"ts":{start_us},'
            f'"dur":{round(end_us - start_us, 3)},"args":{{"step":{step.step}}}}}'
        )
        for name, value in step.counts.items():
            self._counters.count(name, step.end_s, f'"value":{value}')

    def _text(self) -> str:
        text = ",\n".join(self._lines)
        self._lines.clear()
        return text


@dataclass(slots=True)
class _Track:
    """Track whose slices must not overlap; an operation that would overlap becomes an asynchronous event."""

    place: str
    """Process and thread ids of the track, in the trace's syntax."""
    reach_us: float = 0.0


class _Tracks(dict[tuple[int, str], _Track]):
    """(process, name) -> track. A missing track is made on access."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def __missing__(self, key: tuple[int, str]) -> _Track:
        return self.reserve(*key, len(self))

    def reserve(self, process: int, name: str, number: int) -> _Track:
        """Makes a track before anything is drawn on it."""
        self[process, name] = _Track(f'"pid":{process},"tid":{number}')
        _write_name(self._lines, "thread_name", process, number, name)
        return self[process, name]


class _Arrows:
    """Arrows from the call that finished a group's last sample to each role's first operation that trains on it."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._origins: dict[int, list[tuple[_Track, float]]] = {}
        """Ends of calls by group. A surplus sample of a group may finish after the group was trained on."""
        self._number = 0

    def add_generation(self, span: Span, track: _Track) -> None:
        """Remembers the call that finished each group."""
        inside_us = max(_to_microseconds(span.start_s), round(_to_microseconds(span.end_s) - 1.0, 3))
        for gid in span.finished_groups:
            self._origins.setdefault(gid, []).append((track, inside_us))
        while len(self._origins) > MAX_ORIGINS:
            del self._origins[next(iter(self._origins))]

    def end_at(self, span: Span, track: _Track) -> None:
        """Draws the arrows that end at a span. Only training spans have any."""
        if span.bin != "train":
            return
        start_us = _to_microseconds(span.start_s)
        here = f'{track.place},"ts":{start_us}'
        for gid in dict.fromkeys(sample.gid for sample in span.samples):
            before = [origin for origin in self._origins.get(gid, ()) if origin[1] <= start_us]
            if before:
                from_track, from_us = before[-1]
                self._number += 1
                base = f'"name":"trained on","cat":"sample","id":{self._number}'
                self._lines.append(
                    f'{{"ph":"s",{base},{from_track.place},"ts":{from_us},"args":{{"group":{gid}}}}},\n'
                    f'{{"ph":"f","bp":"e",{base},{here}}}'
                )


class _Counters:
    """Numbers over time, each written when it changes."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._last: dict[str, str] = {}

    def count_call(self, served: EngineCall) -> None:
        """Writes an engine's counters at the begin and end of a call."""
        span, kv_use = served.span, round(served.kv_use, 3)
        left_use = kv_use if served.num_running else 0.0
        for at_s, running, use in ((span.start_s, served.batch, kv_use), (span.end_s, served.num_running, left_use)):
            values = f'"running sequences":{running},"KV use":{use},"queued requests":{served.num_queued}'
            self.count(span.group, at_s, values)

    def count(self, name: str, at_s: float, values: str) -> None:
        """Writes numbers, as members of a JSON object, if they changed."""
        if self._last.get(name) == values:
            return
        self._last[name] = values
        self._lines.append(
            f'{{"ph":"C","name":{_quote_text(name)},"pid":{RUN_PROCESS},"tid":0,"ts":{_to_microseconds(at_s)},"args":{{{values}}}}}'
        )


def _to_microseconds(seconds: float) -> float:
    """Converts seconds to microseconds, rounded to nanoseconds, so that equal times give equal numbers."""
    return round(seconds * 1e6, 3)


@lru_cache(maxsize=4096)
def _make_heads(group: str, rank: int, operation: str) -> tuple[str, str]:
    """Returns the name and category of an operation's events, and the name of its worker's track."""
    role = group.partition("/")[0]
    return f'"name":{_quote_text(f"{role}.{operation}")},"cat":{_quote_text(role)}', f"{group} rank {rank}"


def _describe_work(call: EngineCall) -> str:
    """Returns the work of an engine's call as arguments; profiles are fitted to these."""
    prompt_tokens = call.num_prompt_tokens + call.num_repeated_tokens
    return (
        f',"batch":{call.batch},"running":{call.num_running},"new_tokens":{call.num_new_tokens},'
        f'"prompt_tokens":{prompt_tokens},"held_tokens":{round(call.num_held_tokens)},"kv_use":{round(call.kv_use, 4)}'
        f"{_list_turns(call)}"
    )


def _list_turns(call: EngineCall) -> str:
    """Returns the turns of the flow's samples that began and ended, as lists of numbers.

    `begun`: group, index, turn, time of the request in microseconds. `ended`: group, index, turn, sampled tokens.
    """
    begun = ",".join(
        [f"[{each.gid},{each.number},{each.turn},{_to_microseconds(each.asked_s)}]" for each in call.begun]
    )
    ended = ",".join([f"[{each.gid},{each.number},{each.turn},{each.num_tokens}]" for each in call.ended])
    return (f',"begun":[{begun}]' if begun else "") + (f',"ended":[{ended}]' if ended else "")


def _names_of(samples: Sequence[SampleLabel]) -> list[JSON]:
    """Returns `uid [indices]` of each group. Samples outside any group (of an evaluation) have only their uid."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for uid, _, index in samples:
        groups[uid].append(index)
    return [f"{uid} {_list_indices(tuple(indices))}" for uid, indices in groups.items()]


@lru_cache(maxsize=4096)
def _list_indices(indices: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, indices))}]"


@lru_cache(maxsize=4096)
def _quote_text(text: str) -> str:
    return json.dumps(text)


def _write_name(lines: list[str], kind: str, process: int, thread: int, name: str) -> None:
    args = f'"args":{{"name":{_quote_text(name)}}}'
    lines.append(f'{{"ph":"M","name":"{kind}","pid":{process},"tid":{thread},{args}}}')
