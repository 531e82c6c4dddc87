"""Timeline: every operation on every device is a span with a cause, kept until the ledger of its step is closed.

The goodput ledger asks for the spans of each step (`Timeline.take`). Any further use of them is a `Recorder`, which
gets the same records at the same moment: a recorder costs nothing while the step goes on.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from interlace.core.types import SampleKey
from interlace.runtime.clock import Clock
from interlace.runtime.worker import Bin


# Not frozen: an operation that ends completes its span in place, which costs a third of making another.
@dataclass(kw_only=True, slots=True, eq=False)
class Span:
    """One operation of one rank. Times are the run clock's seconds."""

    start_s: float
    """When the rank began with it; while it goes on, when it was called."""
    end_s: float = math.inf
    devices: tuple[int, ...]
    """The rank's own; none for an operation off the devices."""
    group: str
    """The worker group, e.g. `rollout/0`."""
    rank: int
    operation: str
    cause: str
    """Reason of the span: `generate`, `train`, `publication`, `switch`, a stage's name; empty where none was given."""
    step: int
    """In training when it was called; the first is 1, and 0 comes before."""
    version: int
    """Version of the weights that an engine serves or takes in; elsewhere the version that was current."""
    bin: Bin | None = None
    """Bin of the ledger, as the operation declares it; None off the devices."""
    phase: str = ""
    """Phase of a step, as the operation declares it."""
    given: Sequence[Any] = ()
    """Its first argument, where that is a sequence: samples or requests, mostly."""
    finished: Sequence[SampleKey] = ()
    """Rows of the flow that it brought to an end, such as samples that were generated whole; rank 0's."""

    @property
    def role(self) -> str:
        """The group's name without the instance number."""
        return self.group.partition("/")[0]


@dataclass(kw_only=True, slots=True, eq=False)
class EngineCall:
    """Work that one call of a rollout engine computed."""

    span: Span
    """Span of rank 0."""
    devices: tuple[int, ...]
    """Devices of all ranks."""
    batch: int
    """Sequences that decoded together."""
    num_new_tokens: int
    """Tokens drawn."""
    num_prompt_tokens: int
    """Prompt tokens of sequences that began with this call."""
    num_repeated_tokens: int
    """Computed before and now again: of sequences that were taken out and resubmitted, or whose cache was dropped."""
    num_running: int = 0
    """Sequences that go on after it."""
    num_queued: int = 0
    """Requests that wait for the engine, before it and inside."""
    num_waiting: int = 0
    """Queued requests that wait inside the engine."""
    num_preemptions: int = 0
    """Sequences that lost their cells of the KV cache in it."""
    kv_use: float = 0.0
    """Largest share of the KV cache that was held, 0 ... 1."""
    num_held_tokens: float = 0.0
    """Tokens of the contexts of its sequences, mean over the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolWait:
    """Time in which an engine had nothing to do, and samples of its own had tools running."""

    devices: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step that ended."""

    step: int
    """The first is 1."""
    start_s: float
    end_s: float
    counts: Mapping[str, float]
    """Values that are drawn over time: staleness, samples in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """All of one stretch of a run."""

    spans: Sequence[Span]
    """Spans that ended in the stretch, in the order in which they ended."""
    running: Sequence[Span]
    """Spans that go on."""
    served: Sequence[EngineCall]
    steps: Sequence[StepRecord]
    num_dropped_tokens: int
    """Generated of samples that ended before they were finished."""
    end_s: float
    waits: Sequence[ToolWait] = ()
    """Waits for tools that ended in the stretch, and those that go on, until now."""

    @property
    def touching(self) -> Sequence[Span]:
        """Whatever ran in the stretch; some may have begun before it."""
        return [*self.spans, *self.running]


class Recorder(Protocol):
    """Keeper of what the ledger has no need of once a step is over."""

    def keep(self, records: Records) -> None:
        """Takes in one stretch after the other, without a gap."""
        ...

    def close(self, records: Records) -> None:
        """Takes in the last stretch; what is still running then is not reported again."""
        ...


class NoRecorder:
    """Recorder that keeps nothing."""

    def keep(self, records: Records) -> None:
        """Does nothing."""

    def close(self, records: Records) -> None:
        """Does nothing."""


class KeepAll:
    """Recorder that keeps what ended, to be looked at afterwards."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.steps: list[StepRecord] = []

    def keep(self, records: Records) -> None:
        """Adds a stretch."""
        self.spans += records.spans
        self.steps += records.steps

    close = keep


@dataclass(kw_only=True)
class Timeline:
    """Spans of the current stretch, what rollout engines computed in it, and where the run is."""

    clock: Clock
    step: int = 0
    """Step that new spans are marked with; set by the loop."""
    version: int = 0
    """Current version of the weights, which marks new spans; set at each publication."""
    _recorder: Recorder = field(default_factory=NoRecorder)
    _spans: list[Span] = field(default_factory=list)
    _running: dict[Span, None] = field(default_factory=dict)
    _served: list[EngineCall] = field(default_factory=list)
    _steps: list[StepRecord] = field(default_factory=list)
    _num_dropped_tokens: int = 0
    _waits: list[ToolWait] = field(default_factory=list)
    _waiting: dict[int, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    _num_waits: int = 0

    def begin(self, span: Span) -> None:
        """Notes that an operation was called."""
        self._running[span] = None

    def end(self, span: Span, start_s: float, end_s: float) -> None:
        """Records that an operation ended, after it ran from start to end."""
        del self._running[span]
        span.start_s, span.end_s = start_s, end_s
        self._spans.append(span)

    def serve(self, served: EngineCall) -> None:
        """Notes that a call of a rollout engine ended."""
        self._served.append(served)

    def begin_wait(self, devices: tuple[int, ...]) -> int:
        """Notes that an engine on these devices waits for tools from now on. Returns the token for end_wait()."""
        self._num_waits += 1
        self._waiting[self._num_waits] = devices, self.clock.now()
        return self._num_waits

    def end_wait(self, token: int) -> None:
        """Notes that it waits no more."""
        wait, now_s = self._waited(self._waiting.pop(token)), self.clock.now()
        if wait.start_s < now_s:
            self._waits.append(wait)

    def _waited(self, began: tuple[tuple[int, ...], float]) -> ToolWait:
        return ToolWait(devices=began[0], start_s=began[1], end_s=self.clock.now())

    def drop_tokens(self, count: int) -> None:
        """Tokens were generated of a sample that ended before it was finished."""
        self._num_dropped_tokens += count

    def end_step(self, record: StepRecord) -> None:
        """Notes that a step ended."""
        self._steps.append(record)

    def take(self) -> Records:
        """Closes the stretch that began with the last take(), and hands it to the recorder too."""
        records = self._records()
        self._recorder.keep(records)
        return records

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """Gives a recorder what happens inside, and what was not taken before."""
        before, self._recorder = self._recorder, recorder
        try:
            yield
        finally:
            self._recorder = before
            recorder.close(self._records())

    def _records(self) -> Records:
        records = Records(
            spans=self._spans,
            running=list(self._running),
            served=self._served,
            steps=self._steps,
            num_dropped_tokens=self._num_dropped_tokens,
            end_s=self.clock.now(),
            waits=[*self._waits, *map(self._waited, self._waiting.values())],
        )
        self._spans, self._served, self._steps, self._waits = [], [], [], []
        self._num_dropped_tokens = 0
        return records


class OnDevices(Protocol):
    """Whatever takes place on devices."""

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
