"""Questions and answers of the planner: limits, fidelity, predictions, plans."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field

from interlace.core.config import Config
from interlace.forecast.search.candidates import Candidate, period_steps, warm_up_steps
from interlace.schedule.schedule import Schedule

SAME_LENGTH = 1e-3
"""Length shift that is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """Bounds that the user sets."""

    max_staleness: int = 0
    """Versions by which any sample may be stale; 0 is on-policy."""
    max_sync_every: int = 1
    """Steps per version at most: with more, several steps train on samples of the same weights."""
    max_length_shift: float = 1.0
    """Share by which what is trained on may be shorter than what was generated."""
    max_step_s: float = math.inf
    """Seconds of a step at most."""

    def refusal(self, schedule: Schedule) -> str | None:
        """Returns why a schedule is out of bounds before it is tried; None where it is not."""
        if schedule.staleness_bound > self.max_staleness:
            allowed = self.max_staleness
            return f"samples may be {schedule.staleness_bound} versions stale, more than the {allowed} allowed"
        if schedule.sync_every > self.max_sync_every:
            return f"publishes every {schedule.sync_every} steps, and {self.max_sync_every} is allowed"
        return None


class PlanBounds(Config):
    """Bounds of a plan as settings."""

    max_staleness: int = Field(default=0, ge=0)
    """Versions by which any sample may be stale; 0 is on-policy."""
    max_sync_every: int = Field(default=1, ge=1)
    """Steps per version at most."""
    max_length_shift: float = Field(default=1.0, ge=0, le=1)
    """Share by which trained responses may be shorter than generated ones."""

    @property
    def bounds(self) -> str:
        """Text of the bounds."""
        stale = f"at most {self.max_staleness} versions stale" if self.max_staleness else "on-policy"
        shift = f", length shift at most {self.max_length_shift:.0%}" if self.max_length_shift < 1 else ""
        return stale + shift

    def limits(self, max_step_s: float) -> PlanLimits:
        """Returns the limits of a search. max_step_s: seconds of a step at most."""
        return PlanLimits(
            max_staleness=self.max_staleness,
            max_sync_every=self.max_sync_every,
            max_length_shift=self.max_length_shift,
            max_step_s=max_step_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """How closely a candidate is looked at."""

    scale: int = 1
    """Devices and prompts are divided by this."""
    steps: int = 4
    """Steps that are counted, at least."""

    def counted_steps(self, schedule: Schedule) -> int:
        """Returns the steps counted: whole periods of what the schedule repeats."""
        period = period_steps(schedule)
        return math.ceil(self.steps / period) * period

    def num_steps(self, schedule: Schedule) -> int:
        """Returns the steps simulated: those that fill the pipeline come on top."""
        return warm_up_steps(schedule) + self.counted_steps(schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Prediction for a schedule."""

    step_s: float
    """Mean over the counted steps."""
    error_s: float
    """Standard error of that mean, over the steps. It says nothing of the profile's own errors."""
    tokens_per_s: float
    """Trained prompt and response tokens, of all devices together."""
    goodput: float
    """Share of device time that is useful work."""
    staleness_mean: float
    """Versions."""
    staleness_max: float
    length_shift: float
    """Mean length trained on against generated, less 1."""
    bins: Mapping[str, float] = field(default_factory=dict)
    """Share of device time of each bin of the goodput ledger."""

    @property
    def is_unbiased(self) -> bool:
        """True if what is trained on is as long as what was generated."""
        return abs(self.length_shift) < SAME_LENGTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A candidate that cannot run."""

    reason: str


Scorer = Callable[[Sequence[tuple[Schedule, Fidelity]]], Sequence[Score | Refused | None]]
"""Predicts schedules, each for the cluster divided by its scale; None for a schedule that the time did not allow."""


class Effort(Protocol):
    """Effort that a search may spend."""

    @property
    def share_left(self) -> float:
        """Share of the effort that is left, 0 ... 1."""
        ...

    def spend(self, num_samples: int) -> None:
        """Notes that samples were simulated."""
        ...

    def affords(self, num_samples: int) -> bool:
        """Returns whether simulating this number of samples is within what is left."""
        ...

    def report(self, text: str) -> None:
        """Shows the state of the search."""
        ...


class SampleEffort:
    """Effort in simulated samples: the same search for the same arguments, regardless of the machine."""

    def __init__(self, num_samples: int) -> None:
        self._total = self._left = num_samples

    @property
    def share_left(self) -> float:
        """Share of the samples that is left."""
        return max(0.0, self._left / self._total)

    def spend(self, num_samples: int) -> None:
        """Notes that samples were simulated."""
        self._left -= num_samples

    def affords(self, num_samples: int) -> bool:
        """Returns whether this number of samples is left."""
        return num_samples <= self._left

    def report(self, text: str) -> None:
        """Shows nothing."""


Accepts = Callable[[Schedule], str | None]
"""Returns why a schedule cannot run here, beside what the profile says; None where it can."""


def accept_all(schedule: Schedule) -> None:
    """Accepts any schedule: an `Accepts` where the profile and the settings say all."""
    del schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A schedule for the whole cluster and its prediction."""

    name: str
    """Preset that it is, or the one from which the search came to it."""
    schedule: Schedule
    score: Score
    staleness_bound: int
    """Versions by which a sample may be stale, at most."""
    candidate: Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """Account of a preset that is not the best."""

    preset: str
    ratio: float | None
    """Trained tokens/s against the best plan's; None where the preset was not simulated."""
    loses: Sequence[tuple[str, float]] = ()
    """(bin, device-seconds more for each device-second of the best plan's) where more is spent on a trained token."""
    reason: str = ""
    """Why it was not simulated, or is out of bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Outcome of a search."""

    ranked: Sequence[Planned]
    """Plans, the best first: those that were looked at on the whole cluster, then those on a model of it."""
    baseline: Planned | None
    """`verl-colocated`; None where it cannot run."""
    current: Planned | None
    """The schedule that is followed now; None where none was given or it cannot run."""
    front: Sequence[Planned]
    """Plans that no other of them beats in speed, staleness and length bias at once."""
    why_not: Sequence[WhyNot]
    num_scored: int
    num_pruned: int
    """Candidates that bounds or memory ruled out before they were simulated."""

    @property
    def best(self) -> Planned:
        """The fastest plan."""
        return self.ranked[0]

    @property
    def unbiased(self) -> Planned | None:
        """The fastest plan that trains on responses as long as were generated; None where none was looked at."""
        return next((plan for plan in self.ranked if plan.score.is_unbiased), None)

    def ratio(self, plan: Planned) -> float | None:
        """Returns a plan's trained tokens/s against the baseline's."""
        return plan.score.tokens_per_s / self.baseline.score.tokens_per_s if self.baseline else None


def pareto(plans: Sequence[Planned]) -> list[Planned]:
    """Returns the plans that no other equals or beats in speed, staleness and length bias alike, the fastest first."""

    def beats(one: Planned, two: Planned) -> bool:
        better = one.score.tokens_per_s >= two.score.tokens_per_s and one.staleness_bound <= two.staleness_bound
        return better and abs(one.score.length_shift) <= abs(two.score.length_shift) + SAME_LENGTH

    front: list[Planned] = []
    for plan in sorted(plans, key=lambda each: (-each.score.tokens_per_s, each.staleness_bound)):
        if not any(beats(other, plan) for other in front):
            front.append(plan)
    return front


def differing(schedule: Schedule) -> dict[str, object]:
    """Returns the fields of a schedule that are not the defaults, as a schedule's file has them."""
    given, default = schedule.model_dump(mode="json"), Schedule().model_dump(mode="json")
    found: dict[str, object] = {name: value for name, value in given.items() if value != default[name]}
    if isinstance(placement := found.get("placement"), dict):
        found["placement"] = {role: _short(where) for role, where in placement.items() if where}
    if isinstance(tail := found.get("tail"), dict) and len(tail) == 1:
        found["tail"] = tail["kind"]
    return found


def _short(where: Mapping[str, object]) -> object:
    return where["devices"] if where.get("devices_per_instance") in (None, 1) else dict(where)
