"""Timeline: every operation on every device is a span with a cause, kept until the ledger of its step is closed.

The goodput ledger takes the spans of each step (`Timeline.take`). Any other consumer is a `Recorder`, which gets the
same records at the same moment, so a recorder costs nothing during the step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from interlace.core.row import SampleLabel
from interlace.runtime.waits import Clock
from interlace.runtime.worker import Bin


# Not frozen: an operation that ends completes its span in place, which costs a third of making another.
@dataclass(kw_only=True, slots=True, eq=False)
class Span:
    """One operation of one rank. Times are the run clock's seconds."""

    start_s: float
    """Start of the operation on the rank; before its end is known, the time of the call."""
    end_s: float = math.inf
    devices: tuple[int, ...]
    """The rank's devices. Empty for an operation that uses none."""
    group: str
    """The worker group, e.g. `rollout/0`."""
    rank: int
    operation: str
    cause: str
    """Cause of the span: `generate`, `train`, `publication`, `switch` or a stage's name. Empty if none was given."""
    step: int
    """Training step at the time of the call. The first step is 1; 0 is the time before it."""
    version: int
    """Version of the weights that an engine serves or receives; for other groups, the current version."""
    bin: Bin | None = None
    """Bin of the ledger that the operation declares. None for an operation that uses no devices."""
    phase: str = ""
    """Phase of a step that the operation declares."""
    samples: Sequence[SampleLabel] = ()
    """Samples of the call's first argument, if the timeline is recorded."""
    finished_groups: Sequence[int] = ()
    """Groups of the samples that the operation generated completely. Set for rank 0."""

    @property
    def role(self) -> str:
        """The group's name without the instance number."""
        return self.group.partition("/")[0]


class TurnStart(NamedTuple):
    """A turn of a sample that an engine began, or continued after an interruption."""

    gid: int
    number: int
    """Index of the sample within its group."""
    turn: int
    asked_s: float
    """Time of the request, in seconds of the run's clock."""


class TurnEnd(NamedTuple):
    """A turn of a sample that an engine finished."""

    gid: int
    number: int
    """Index of the sample within its group."""
    turn: int
    num_tokens: int
    """Tokens that the policy drew."""


@dataclass(kw_only=True, slots=True, eq=False)
class EngineCall:
    """Work of one call of a rollout engine."""

    span: Span
    """Span of rank 0."""
    devices: tuple[int, ...]
    """Devices of all ranks."""
    batch: int
    """Sequences that decoded together."""
    num_new_tokens: int
    """Tokens drawn."""
    num_prompt_tokens: int
    """Prompt tokens of sequences that began in this call."""
    num_repeated_tokens: int
    """Tokens computed again: of resubmitted sequences, or of sequences whose cache was dropped."""
    num_running: int = 0
    """Sequences that continue after the call."""
    num_queued: int = 0
    """Requests that wait for the engine, both before it and inside."""
    num_waiting: int = 0
    """Queued requests that wait inside the engine."""
    num_preemptions: int = 0
    """Sequences that lost their KV-cache cells in the call."""
    kv_use: float = 0.0
    """Largest share of the KV cache in use, 0 ... 1."""
    num_held_tokens: float = 0.0
    """Context tokens of its sequences, averaged over the call."""
    begun: Sequence[TurnStart] = ()
    """Turns of the flow's samples that began in this call."""
    ended: Sequence[TurnEnd] = ()
    """Turns of the flow's samples that ended in this call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolWait:
    """Time in which an engine was idle while tools ran for its samples."""

    devices: tuple[int, ...]
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step that ended."""

    step: int
    """Number of the step; the first is 1."""
    start_s: float
    end_s: float
    counts: Mapping[str, float]
    """Values that are plotted over time: staleness, samples in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """All records of one stretch of a run."""

    spans: Sequence[Span]
    """Spans that ended in the stretch, in the order in which they ended."""
    running: Sequence[Span]
    """Spans that are still running."""
    served: Sequence[EngineCall]
    steps: Sequence[StepRecord]
    num_dropped_tokens: int
    """Generated tokens of samples that ended before they were finished."""
    end_s: float
    waits: Sequence[ToolWait] = ()
    """Waits for tools that ended in the stretch, and those still in progress, up to now."""

    @property
    def touching(self) -> Sequence[Span]:
        """Spans that overlap the stretch. Some may have begun before it."""
        return [*self.spans, *self.running]


class Recorder(Protocol):
    """Consumer of records that the ledger does not need after a step."""

    def keep(self, records: Records) -> None:
        """Accepts the next stretch. Consecutive stretches have no gap."""

    def close(self, records: Records) -> None:
        """Accepts the last stretch. Spans that are still running are not reported again."""


class NoRecorder:
    """Recorder that keeps nothing."""

    def keep(self, records: Records) -> None:
        """Does nothing."""

    def close(self, records: Records) -> None:
        """Does nothing."""


class KeepAll:
    """Recorder that keeps all ended spans and steps for later inspection."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.steps: list[StepRecord] = []

    def keep(self, records: Records) -> None:
        self.spans += records.spans
        self.steps += records.steps

    close = keep


@dataclass(kw_only=True)
class Timeline:
    """Spans and engine calls of the current stretch, and the position of the run."""

    clock: Clock
    step: int = 0
    """Current step, recorded in new spans; set by the loop."""
    version: int = 0
    """Current version of the weights, recorded in new spans; set at each publication."""
    prompts_s: dict[str, float] = field(default_factory=dict)
    """Time at which each engine, by its group, last got a new prompt."""
    _recorder: Recorder = field(default_factory=NoRecorder)
    _spans: list[Span] = field(default_factory=list)
    _running: dict[Span, None] = field(default_factory=dict)
    _served: list[EngineCall] = field(default_factory=list)
    _steps: list[StepRecord] = field(default_factory=list)
    _num_dropped_tokens: int = 0
    _waits: list[ToolWait] = field(default_factory=list)
    _waiting: list[ToolWait] = field(default_factory=list)
    """Waits that have not ended."""

    @property
    def is_recorded(self) -> bool:
        """True if a recorder gets the records, so that spans need the names of their samples."""
        return type(self._recorder) is not NoRecorder

    @property
    def running(self) -> list[Span]:
        """Returns the operations that were called and have not ended. Another thread may call it."""
        return list(self._running)

    def begin(self, span: Span) -> None:
        self._running[span] = None

    def end(self, span: Span, start_s: float, end_s: float) -> None:
        """Records the end of an operation, which ran from start_s to end_s."""
        del self._running[span]
        span.start_s, span.end_s = start_s, end_s
        self._spans.append(span)

    def serve(self, served: EngineCall) -> None:
        """Records a call of a rollout engine that ended."""
        self._served.append(served)

    def begin_wait(self, devices: tuple[int, ...]) -> ToolWait:
        """Registers that an engine on these devices now waits for tools. Returns the wait for end_wait()."""
        self._waiting.append(ToolWait(devices=devices, start_s=self.clock.now()))
        return self._waiting[-1]

    def end_wait(self, wait: ToolWait) -> None:
        self._waiting.remove(wait)
        if wait.start_s < (now_s := self.clock.now()):
            self._waits.append(replace(wait, end_s=now_s))

    def drop_tokens(self, count: int) -> None:
        """Counts generated tokens of a sample that ended before it was finished."""
        self._num_dropped_tokens += count

    def end_step(self, record: StepRecord) -> None:
        self._steps.append(record)

    def take(self) -> Records:
        """Ends the stretch that began with the last take(). Returns its records and passes them to the recorder."""
        records = self._records()
        self._recorder.keep(records)
        return records

    @contextmanager
    def record_with(self, recorder: Recorder) -> Iterator[None]:
        """Passes all records inside the block to a recorder, including earlier ones that were not taken."""
        before, self._recorder = self._recorder, recorder
        try:
            yield
        finally:
            self._recorder = before
            recorder.close(self._records())

    def _records(self) -> Records:
        now_s = self.clock.now()
        records = Records(
            spans=self._spans,
            running=self.running,
            served=self._served,
            steps=self._steps,
            num_dropped_tokens=self._num_dropped_tokens,
            end_s=now_s,
            waits=[*self._waits, *(replace(wait, end_s=now_s) for wait in self._waiting)],
        )
        self._spans, self._served, self._steps, self._waits = [], [], [], []
        self._num_dropped_tokens = 0
        return records


class OnDevices(Protocol):
    """An entry that occupies devices."""

    @property
    def devices(self) -> tuple[int, ...]: ...


D = TypeVar("D", bound=OnDevices)


def by_device(entries: Iterable[D], num_devices: int) -> list[list[D]]:
    """Returns the entries of each device, in order."""
    found: list[list[D]] = [[] for _ in range(num_devices)]
    for entry in entries:
        for device in entry.devices:
            found[device].append(entry)
    return found


def busy_seconds(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Returns the length of the union of the spans' intervals within [start_s, end_s]."""
    intervals = sorted([(span.start_s, span.end_s) for span in spans])
    total, reach = 0.0, start_s
    for low, end in intervals:
        high = end if end < end_s else end_s
        if high > reach:
            gained = high - (low if low > reach else reach)
            total += gained if gained > 0 else 0.0
            reach = high
    return total
