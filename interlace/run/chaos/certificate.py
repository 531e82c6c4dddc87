"""Certificate of a run under faults: the effect of each fault, and the count of lost and duplicated samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from interlace.core.types import JSON, TerminalEvent
from interlace.run.chaos.phases import PHASES, Phase


class EndedKey(NamedTuple):
    """A sample that ended, and how."""

    gid: int
    index: int  # type: ignore[assignment]  # tuple.index() is never called on a key
    event: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRecord:
    """One injected fault."""

    fault: str
    """Its specification."""
    role: str
    target: str
    """The process or engine."""
    at_s: float
    """Seconds from the start of the run."""
    recovered_s: float | None
    """Seconds from the fault to a replacement; None if none was needed before the end of the run."""
    phase: Phase | None = None
    """Activity of the process, or else of the run. None on the virtual clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Outcome of a run under faults, compared with the same run without them."""

    faults: Sequence[FaultRecord]
    is_complete: bool
    """True if the run came to its last step."""
    error: str
    """Error by which it ended before; empty if it is complete."""
    events: Mapping[str, int]
    """Number of samples by terminal event."""
    lost: int
    """Admitted samples without a terminal event."""
    duplicated: int
    """Terminal events of samples that had ended before."""
    staleness_max: float
    staleness_bound: int
    step_s: float
    """Seconds of all steps."""
    step_s_without_faults: float
    samples_equal: bool | None
    """True if the run trained the same samples as without faults. None if the schedule does not promise it."""
    weights_equal: bool | None
    """True if the final weights are bit-equal to the run without faults. None if the schedule does not promise it."""

    @property
    def injected(self) -> int:
        """Number of faults."""
        return len(self.faults)

    @property
    def by_phase(self) -> Mapping[str, Mapping[str, int]]:
        """Numbers of faults by role and phase. Empty on the virtual clock."""
        struck = sorted({fault.role for fault in self.faults if fault.phase})
        counts = Counter((fault.role, fault.phase) for fault in self.faults)
        return {role: {each: counts[role, each] for each in PHASES if counts[role, each]} for role in struck}

    @property
    def survived(self) -> int:
        """Number of faults after which the run continued to its end."""
        return self.injected if self.is_complete else max(0, self.injected - 1)

    @property
    def effective_time(self) -> float:
        """Share of the time that the steps would have taken without faults, at most 1."""
        return min(1.0, self.step_s_without_faults / self.step_s) if self.step_s else 0.0

    @property
    def is_broken(self) -> bool:
        """Returns whether the run ended early or broke a promise."""
        is_equal = self.weights_equal is not False and self.samples_equal is not False
        is_bounded = self.staleness_max <= self.staleness_bound
        return not (self.is_complete and not self.lost and not self.duplicated and is_bounded and is_equal)

    @property
    def missing(self) -> Sequence[str]:
        """Returns the reasons for which the run tested no promise."""
        found = () if self.faults else ("no fault was injected",)
        return found if self.events.get(TerminalEvent.TRAINED) else (*found, "no sample was trained")

    @property
    def holds(self) -> bool:
        """Returns whether the run trained under faults, survived them and kept every promise."""
        return not self.is_broken and not self.missing

    def row(self) -> Mapping[str, JSON]:
        """Returns the certificate as JSON."""
        return {
            "holds": self.holds,
            "missing": list(self.missing),
            "injected": self.injected,
            "survived": self.survived,
            "by_phase": {role: dict(counts) for role, counts in self.by_phase.items()},
            "samples": dict(self.events),
            "lost": self.lost,
            "duplicated": self.duplicated,
            "staleness_max": self.staleness_max,
            "staleness_bound": self.staleness_bound,
            "effective_time": self.effective_time,
            "samples_equal": self.samples_equal,
            "weights_equal": self.weights_equal,
            "error": self.error,
            "faults": [asdict(fault) for fault in self.faults],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """Counts of terminal events."""

    events: Mapping[str, int]
    lost: int
    duplicated: int

    @classmethod
    def of(cls, ended: Sequence[EndedKey], samples_per_prompt: int) -> "SampleCounts":
        """Counts the samples of a run that has ended. Groups are numbered from 0 without gaps."""
        keys = Counter((each.gid, each.index) for each in ended)
        groups = Counter(gid for gid, _ in keys)
        num_groups = max(groups, default=-1) + 1
        lost = sum(max(0, samples_per_prompt - groups[gid]) for gid in range(num_groups))
        events = Counter(str(each.event) for each in ended)
        return cls(events=dict(sorted(events.items())), lost=lost, duplicated=sum(keys.values()) - len(keys))
