"""Every operation on every device is a span with a cause. Written as Chrome trace JSON, which Perfetto opens."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from interlace.core.types import JSON
from interlace.schedule.placement import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One operation of one rank. Times are the run clock's seconds."""

    start_s: float
    end_s: float
    devices: tuple[int, ...]
    group: str
    """The worker group, e.g. `rollout/0`."""
    rank: int
    operation: str
    cause: str
    """Why it ran: the stage's step, `publication`, `switch` ..."""

    @property
    def role(self) -> str:
        """The group's name without the instance number."""
        return self.group.partition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What one call of a rollout engine computed."""

    start_s: float
    end_s: float
    devices: tuple[int, ...]
    group: str
    batch: int
    """Sequences that decoded together."""
    num_new_tokens: int
    """Drawn."""
    num_prompt_tokens: int
    """Of sequences that began with this call."""
    num_repeated_tokens: int
    """Computed before and now again: of sequences that were taken out and resubmitted, or whose cache was dropped."""


class Timeline:
    """Spans in the order in which they ended, those that have not ended yet, and what rollout engines computed."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._open: dict[int, Span] = {}
        self._numbers = itertools.count()
        self._served: list[Served] = []
        self._num_dropped_tokens = 0

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, span: Span) -> int:
        """Records an operation that starts; its end_s is infinite. Returns what end() wants."""
        number = next(self._numbers)
        self._open[number] = span
        return number

    def end(self, number: int, end_s: float) -> None:
        """An operation ended."""
        begun = self._open.pop(number)
        # Written out: dataclasses.replace takes twice as long, and this runs with every operation.
        span = Span(
            start_s=begun.start_s,
            end_s=end_s,
            devices=begun.devices,
            group=begun.group,
            rank=begun.rank,
            operation=begun.operation,
            cause=begun.cause,
        )
        self.add(span)

    def add(self, span: Span) -> None:
        """Records a finished operation."""
        self._spans.append(span)

    def since(self, position: int) -> Sequence[Span]:
        """Spans recorded from a position (an earlier len()) on."""
        return self._spans[position:]

    def touching(self, position: int) -> Sequence[Span]:
        """Spans that ended from a position on, and those that go on."""
        return [*self._spans[position:], *self._open.values()]

    def serve(self, served: Served) -> None:
        """Records a call of a rollout engine."""
        self._served.append(served)

    def drop_tokens(self, count: int) -> None:
        """Tokens were generated of a sample that ended before it was finished."""
        self._num_dropped_tokens += count

    def take_served(self) -> tuple[Sequence[Served], int]:
        """Calls of rollout engines, and tokens dropped, since the last time."""
        served, self._served = self._served, []
        dropped, self._num_dropped_tokens = self._num_dropped_tokens, 0
        return served, dropped

    def write(self, path: Path, devices: Sequence[Device]) -> None:
        """Writes the Chrome trace format: one track a device and one a worker rank."""
        events = [*_track_names(self._spans, devices), *_events(self._spans)]
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        temporary.replace(path)


class OnDevices(Protocol):
    """Whatever takes place on devices."""

    @property
    def devices(self) -> tuple[int, ...]: ...


D = TypeVar("D", bound=OnDevices)


def by_device(entries: Iterable[D], num_devices: int) -> list[list[D]]:
    """Of each device, what took place there, in order."""
    found: list[list[D]] = [[] for _ in range(num_devices)]
    for entry in entries:
        for device in entry.devices:
            found[device].append(entry)
    return found


def busy_seconds(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Length of the union of the spans' intervals within [start_s, end_s]."""
    intervals = sorted((max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans)
    total, reach = 0.0, start_s
    for low, high in intervals:
        total += max(0.0, high - max(low, reach))
        reach = max(reach, high)
    return total


DEVICE_PROCESS, WORKER_PROCESS = 1, 2


def _worker_tracks(spans: Sequence[Span]) -> dict[tuple[str, int], int]:
    return {key: number for number, key in enumerate(sorted({(span.group, span.rank) for span in spans}))}


def _track_names(spans: Sequence[Span], devices: Sequence[Device]) -> Iterator[JSON]:
    def name(kind: str, process: int, thread: int, text: str) -> JSON:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}

    yield name("process_name", DEVICE_PROCESS, 0, "devices")
    yield name("process_name", WORKER_PROCESS, 0, "workers")
    for device in devices:
        yield name("thread_name", DEVICE_PROCESS, device.index, device.name)
    for (group, rank), track in _worker_tracks(spans).items():
        yield name("thread_name", WORKER_PROCESS, track, f"{group} rank {rank}")


def _events(spans: Sequence[Span]) -> Iterator[JSON]:
    tracks = _worker_tracks(spans)
    for span in spans:
        places = [(DEVICE_PROCESS, device) for device in span.devices] if span.rank == 0 else []
        for process, thread in [*places, (WORKER_PROCESS, tracks[span.group, span.rank])]:
            yield {
                "ph": "X",
                "name": f"{span.role}.{span.operation}",
                "cat": span.role,
                "pid": process,
                "tid": thread,
                "ts": round(span.start_s * 1e6, 1),
                "dur": round((span.end_s - span.start_s) * 1e6, 1),
                "args": {"cause": span.cause},
            }
