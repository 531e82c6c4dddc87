"""timeline.json: the run as a Chrome trace, which Perfetto opens, also while the run goes on.

The format is that of the Trace Event Format document (JSON array form, whose closing bracket may be missing): a track
a device, a track a worker rank, a track of steps; an arrow from where a group's last sample was generated to where the
group is trained on; counters. Operations of a rank that overlap (rewards scored at once) stand beside its track, as
asynchronous events. All is written at step boundaries: the file grows with the run, memory does not.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TextIO

from interlace.core.types import JSON, Completion, FinishReason, Request, Sample
from interlace.runtime.goodput import OPERATIONS
from interlace.runtime.timeline import Records, Served, Span, StepRecord
from interlace.schedule.placement import Device

RUN_PROCESS, DEVICE_PROCESS, WORKER_PROCESS = 1, 2, 3
"""Numbers of the groups of tracks."""
MAX_ORIGINS = 1 << 16
"""Groups whose generation is remembered for an arrow; those that were dropped are never asked for."""


class TraceFile:
    """A recorder that writes."""

    def __init__(self, path: Path, devices: Sequence[Device]) -> None:
        """Replaces a file of that name."""
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._devices = tuple(devices)
        self._lines: list[str] = []
        self._num_beside = 0
        self._tracks = _Tracks(self._lines)
        self._arrows = _Arrows(self._lines)
        self._counters = _Counters(self._lines)
        for process, name in ((RUN_PROCESS, "run"), (DEVICE_PROCESS, "devices"), (WORKER_PROCESS, "workers")):
            _name(self._lines, "process_name", process, 0, name)
        for device in devices:
            self._tracks.reserve(DEVICE_PROCESS, device.name, device.index)
        self._tracks.reserve(RUN_PROCESS, "steps", 0)
        self._file.write("[\n" + self._text())

    def keep(self, records: Records) -> None:
        """Appends what ended."""
        self._append(records)
        if text := self._text():
            self._file.write(",\n" + text)
            self._file.flush()

    def close(self, records: Records) -> None:
        """Appends the rest. What never ended is drawn until now, and says so."""
        self._append(records)
        for span in records.running:
            self._draw(span, records.end_s)
        text = self._text()
        self._file.write(f",\n{text}\n]\n" if text else "\n]\n")
        self._file.close()

    def _append(self, records: Records) -> None:
        calls = {served.span: served for served in records.served}
        workers = {span: self._draw(span, span.end_s, calls.get(span)) for span in sorted(records.spans, key=_start)}
        for served in records.served:
            if served.span in workers:
                self._arrows.generated(served, workers[served.span])
            self._counters.served(served)
        # After what was generated, some of which the same stretch trains on.
        for span, track in workers.items():
            self._arrows.end_at(span, track)
        for step in records.steps:
            self._step(step)

    def _draw(self, span: Span, end_s: float, served: Served | None = None) -> int:
        """Returns the number of its worker's track, on which alone its samples are named."""
        start_us, end_us = _us(span.start_s), _us(end_s)
        what, worker = _heads(span.group, span.rank, span.operation)
        arguments = f'"cause":{_quoted(span.cause or span.operation)},"step":{span.step},"version":{span.version}'
        if span.end_s == math.inf:
            arguments += ',"unfinished":true'
        for device in span.devices:
            self._slice((DEVICE_PROCESS, self._devices[device].name), what, (start_us, end_us), arguments)
        return self._slice(
            (WORKER_PROCESS, worker), what, (start_us, end_us), arguments + _samples(span) + _finished(served)
        )

    def _slice(self, track_name: tuple[int, str], what: str, when_us: tuple[float, float], arguments: str) -> int:
        start_us, end_us = when_us
        track = self._tracks[track_name]
        what = f'{what},"pid":{track_name[0]},"tid":{track.number}'
        if track.reach_us <= start_us:
            track.reach_us = end_us
            dur = round(end_us - start_us, 3)
            self._lines.append(f'{{"ph":"X",{what},"ts":{start_us},"dur":{dur},"args":{{{arguments}}}}}')
        else:
            self._num_beside += 1
            what += f',"id":{self._num_beside}'
            self._lines.append(
                f'{{"ph":"b",{what},"ts":{start_us},"args":{{{arguments}}}}},\n{{"ph":"e",{what},"ts":{end_us}}}'
            )
        return track.number

    def _step(self, step: StepRecord) -> None:
        start_us, end_us = _us(step.start_s), _us(step.end_s)
        self._lines.append(
            f'{{"ph":"X","name":"step {step.step}","cat":"step","pid":{RUN_PROCESS},"tid":0,"ts":{start_us},'
            f'"dur":{round(end_us - start_us, 3)},"args":{{"step":{step.step}}}}}'
        )
        for name, value in step.counts.items():
            self._counters.count(name, step.end_s, value)

    def _text(self) -> str:
        text = ",\n".join(self._lines)
        self._lines.clear()
        return text


@dataclass(slots=True)
class _Track:
    """Slices of a track must not overlap; what has no room there is drawn as an event beside it."""

    number: int
    reach_us: float = 0.0


class _Tracks(dict[tuple[int, str], _Track]):
    """(process, name) -> track; one that is asked for first is made."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def __missing__(self, key: tuple[int, str]) -> _Track:
        return self.reserve(*key, len(self))

    def reserve(self, process: int, name: str, number: int) -> _Track:
        """A track that is there before anything is on it."""
        self[process, name] = _Track(number)
        _name(self._lines, "thread_name", process, number, name)
        return self[process, name]


class _Arrows:
    """From the call that finished a group's last sample to the first operation of each role that trains on it."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._origins: dict[int, tuple[int, float]] = {}
        self._number = 0

    def generated(self, served: Served, track: int) -> None:
        """Remembers where groups come from."""
        span = served.span
        inside_us = max(_us(span.start_s), round(_us(span.end_s) - 1.0, 3))
        for done in _finishes(served):
            if done.request.sample_index >= 0:
                self._origins[done.request.serial] = (track, inside_us)
        while len(self._origins) > MAX_ORIGINS:
            del self._origins[next(iter(self._origins))]

    def end_at(self, span: Span, track: int) -> None:
        """Draws the arrows that end at a span; none unless it trains."""
        if OPERATIONS.get(span.operation) != "train":
            return
        for gid in dict.fromkeys(sample.key.gid for sample in span.given if isinstance(sample, Sample)):
            if origin := self._origins.get(gid):
                self._number += 1
                base = f'"name":"trained on","cat":"sample","id":{self._number},"pid":{WORKER_PROCESS}'
                self._lines.append(
                    f'{{"ph":"s",{base},"tid":{origin[0]},"ts":{origin[1]},"args":{{"group":{gid}}}}},\n'
                    f'{{"ph":"f","bp":"e",{base},"tid":{track},"ts":{_us(span.start_s)}}}'
                )


class _Counters:
    """Numbers over time, each written where it changes."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._last: dict[str, str] = {}

    def served(self, served: Served) -> None:
        """An engine's, as the call began and after it."""
        span, kv_use = served.span, round(served.kv_use, 3)
        self._write(span.group, span.start_s, _of_engine(served.batch, kv_use, served.num_queued))
        after = _of_engine(served.num_running, kv_use if served.num_running else 0.0, served.num_queued)
        self._write(span.group, span.end_s, after)

    def count(self, name: str, at_s: float, value: float) -> None:
        """One number."""
        self._write(name, at_s, f'"value":{value}')

    def _write(self, name: str, at_s: float, values: str) -> None:
        if self._last.get(name) != values:
            self._last[name] = values
            head = f'{{"ph":"C","name":{_quoted(name)},"pid":{RUN_PROCESS},"tid":0,"ts":{_us(at_s)}'
            self._lines.append(f'{head},"args":{{{values}}}}}')


def _of_engine(num_running: int, kv_use: float, num_queued: int) -> str:
    return f'"running sequences":{num_running},"KV use":{kv_use},"queued requests":{num_queued}'


def _start(span: Span) -> float:
    return span.start_s


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond: the same instant is the same number wherever it stands."""
    return round(seconds * 1e6, 3)


@lru_cache(maxsize=4096)
def _heads(group: str, rank: int, operation: str) -> tuple[str, str]:
    """(name and category of an operation's events, name of its worker's track)."""
    role = group.partition("/")[0]
    return f'"name":{_quoted(f"{role}.{operation}")},"cat":{_quoted(role)}', f"{group} rank {rank}"


def _samples(span: Span) -> str:
    names = names_of(span.given) if span.given else ()
    return f',"samples":{json.dumps(names)}' if names else ""


def _finished(served: Served | None) -> str:
    """[group, sample, response tokens, finish reason] of each sample of the flow that the call finished."""
    found = [
        f'[{done.request.serial},{done.request.sample_index},{len(done.token_ids)},"{done.finish_reason}"]'
        for done in (_finishes(served) if served else ())
    ]
    return f',"finished":[{",".join(found)}]' if found else ""


def _finishes(served: Served) -> list[Completion]:
    """Of the samples of the flow that a call finished."""
    done = [response.completion for response in served.responses]
    return [each for each in done if each.request.serial >= 0 and each.finish_reason != FinishReason.ABORTED]


def names_of(given: Sequence[object]) -> list[JSON]:
    """`uid [indices]` of each group, samples of no group (an evaluation's) by their uid."""
    groups: dict[str, list[int]] = {}
    for item in given:
        if isinstance(item, Sample):
            uid, index = item.prompt.uid, item.key.index
        elif isinstance(item, Request):
            uid, index = item.uid, item.sample_index
        else:
            continue
        if uid in groups:
            groups[uid].append(index)
        else:
            groups[uid] = [index]
    return [uid + f" {indices}".replace(", ", ",") for uid, indices in groups.items()]


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _name(lines: list[str], kind: str, process: int, thread: int, name: str) -> None:
    args = f'"args":{{"name":{_quoted(name)}}}'
    lines.append(f'{{"ph":"M","name":"{kind}","pid":{process},"tid":{thread},{args}}}')
