"""Data types of the planner: limits, fidelity, predictions, plans."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from interlace.core.config import Config
from interlace.forecast.profile.types import Profile
from interlace.forecast.search.bounds import Workload, coarser
from interlace.forecast.search.candidates import Candidate, period_steps, warm_up_steps
from interlace.schedule.schedule import Schedule

SAME_LENGTH = 1e-3
"""Length shift below which a plan counts as unbiased."""
SHORT_TURNS = 8
"""Turns of a robot's episode below the final fidelity."""


class PlanBounds(Config):
    """Limits of a plan as settings."""

    max_staleness: int = Field(default=0, ge=0)
    """Largest staleness of a sample, in versions; 0 is on-policy."""
    max_sync_every: int = Field(default=1, ge=1)
    """Largest number of steps per version."""
    max_length_shift: float = Field(default=1.0, ge=0, le=1)
    """Largest share by which trained responses may be shorter than generated ones."""

    @property
    def bounds(self) -> str:
        stale = f"at most {self.max_staleness} versions stale" if self.max_staleness else "on-policy"
        shift = f", length shift at most {self.max_length_shift:.0%}" if self.max_length_shift < 1 else ""
        return stale + shift

    def refusal(self, schedule: Schedule) -> str | None:
        """Returns the reason why a schedule exceeds the limits; None if it does not. Needs no simulation."""
        if schedule.staleness_bound > self.max_staleness:
            allowed = self.max_staleness
            return f"samples may be {schedule.staleness_bound} versions stale, more than the {allowed} allowed"
        if schedule.sync_every > self.max_sync_every:
            return f"publishes every {schedule.sync_every} steps, and {self.max_sync_every} is allowed"
        return None


class PlanLimits(PlanBounds):
    """Limits of a search."""

    deadline_s: float | None = None
    """Largest seconds of `num_steps` steps."""
    num_steps: int = 1

    @property
    def max_step_s(self) -> float:
        """Largest seconds of a step."""
        return math.inf if self.deadline_s is None else self.deadline_s / self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """Accuracy of a candidate's simulation."""

    scale: int = 1
    """Divisor of the numbers of devices and prompts."""
    steps: int = 4
    """Minimum number of counted steps."""
    turns: int = 1
    """Divisor of the number of turns of robots' episodes, whose turns then take longer."""
    thin: int = 1
    """Divisor of the number of samples, each of which then costs as much as this number of samples."""
    most_step_s: float = field(default=math.inf, compare=False)
    """Mean seconds of a step above which a simulation ends early: the schedule is not among the best."""

    def count_steps(self, schedule: Schedule) -> int:
        """Returns the number of counted steps: whole periods of the schedule."""
        period = period_steps(schedule)
        return math.ceil(self.steps / period) * period

    def num_steps(self, schedule: Schedule) -> int:
        """Returns the number of simulated steps, including those that fill the pipeline."""
        return warm_up_steps(schedule) + self.count_steps(schedule)

    def count_samples(self, num_steps: int, workload: Workload) -> int:
        """Returns the number of simulated samples of some steps, by which efforts are measured."""
        return num_steps * workload.requests_per_step // (self.scale * self.turns * self.thin)


def choose_coarse(workload: Workload, profile: Profile, steps: int) -> Fidelity:
    """Returns the coarsest fidelity: the smallest model of the cluster, and few samples. steps: of Fidelity."""
    scale = coarser(workload)[0]
    turns = max(1, round(workload.turns / SHORT_TURNS)) if workload.num_envs else 1
    return Fidelity(scale=scale, steps=steps, turns=turns, thin=workload.find_thinning(scale, profile))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Prediction for a schedule."""

    step_s: float
    """Mean seconds of the counted steps."""
    error_s: float
    """Standard error of that mean over the steps, without the profile's own errors."""
    tokens_per_s: float
    """Drawn tokens of trained samples per second, of all devices together."""
    goodput: float
    """Share of device time spent on useful work."""
    staleness_mean: float
    """Mean staleness, in versions."""
    staleness_max: float
    length_shift: float
    """Mean trained length divided by the mean generated length, minus 1."""
    bins: Mapping[str, float] = field(default_factory=dict)
    """Share of device time in each bin of the goodput ledger."""
    num_steps: int = 0
    """Simulated steps, including those that fill the pipeline; 0 if not counted."""
    fill_s: float = 0.0
    """Seconds by which the steps that fill an empty pipeline take longer than as many others."""

    @property
    def is_unbiased(self) -> bool:
        """True if trained responses are as long as the generated ones."""
        return abs(self.length_shift) < SAME_LENGTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Candidate that cannot run."""

    reason: str


Scorer = Callable[[Sequence[tuple[Schedule, Fidelity]]], Sequence[Score | Refused | None]]
"""Predicts schedules, each for the cluster divided by its scale; None for a schedule that was not simulated in time."""


class SampleEffort:
    """Effort that a search may spend, in simulated samples: the same arguments give the same search on any machine."""

    def __init__(self, num_samples: int | None) -> None:
        """num_samples: limit, if any."""
        self._limit, self._num_spent = num_samples, 0

    @property
    def share_left(self) -> float:
        """Remaining share of the effort, 0 ... 1."""
        return max(0.0, (self._limit - self._num_spent) / self._limit) if self._limit else 1.0

    def spend(self, num_samples: int) -> None:
        self._num_spent += num_samples

    def affords(self, num_samples: int) -> bool:
        """Returns whether the remaining effort allows to simulate `num_samples`."""
        return not self._limit or num_samples <= self._limit - self._num_spent

    def report(self, text: str) -> None:
        """Reports the state of the search: here, nothing."""


Accepts = Callable[[Schedule], str | None]
"""Returns the reason why a schedule cannot run, in addition to the checks by the profile; None if it can."""


def accept_all(schedule: Schedule) -> None:
    """Accepts any schedule: the `Accepts` of a search without further checks."""
    del schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Schedule for the whole cluster, with its prediction."""

    name: str
    """Preset that the plan is, or from which the search reached it."""
    schedule: Schedule
    score: Score
    staleness_bound: int
    """Largest staleness of a sample, in versions."""
    candidate: Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """Comparison of a preset with the best plan."""

    preset: str
    ratio: float | None
    """Trained tokens/s divided by the best plan's; None if the preset was not simulated."""
    loses: Sequence[tuple[str, float]] = ()
    """(bin, additional device-seconds per trained token, relative to the best plan's total) of the largest losses."""
    reason: str = ""
    """Reason why the preset was not simulated, or exceeds the limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Outcome of a search."""

    ranked: Sequence[Planned]
    """Plans, the fastest first: plans that were simulated on the whole cluster, then plans on a model of it."""
    tied: Sequence[Planned]
    """The fastest plan, and plans of the whole cluster that are slower by no more than the noise of a step."""
    baseline: Planned | None
    """Plan of `verl-colocated`; None if it cannot run."""
    current: Planned | None
    """Plan of the schedule in use; None if none was given or it cannot run."""
    front: Sequence[Planned]
    """Pareto front: plans that no other beats in speed, staleness and length bias at once."""
    why_not: Sequence[WhyNot]
    num_scored: int
    num_pruned: int
    """Candidates that bounds or memory excluded before simulation."""

    @property
    def best(self) -> Planned:
        return self.ranked[0]

    @property
    def least_stale(self) -> Planned:
        """The tied plan with the lowest staleness bound; of several the fastest."""
        return min(self.tied, key=lambda each: each.staleness_bound)

    @property
    def unbiased(self) -> Planned | None:
        """The fastest plan whose trained responses are as long as the generated ones; None if none was simulated."""
        return next((plan for plan in self.ranked if plan.score.is_unbiased), None)

    def ratio(self, plan: Planned) -> float | None:
        """Returns a plan's trained tokens/s divided by the baseline's; None if the baseline trained none."""
        rate = self.baseline.score.tokens_per_s if self.baseline else 0.0
        return plan.score.tokens_per_s / rate if rate else None


def select_tied(plans: Sequence[Planned], noise: float) -> list[Planned]:
    """Returns the fastest plan, and the plans that are slower by no more than the noise, the fastest first.

    plans: the fastest first. noise: relative difference in speed; see `Profile.step_noise`.
    """
    slowest = plans[0].score.tokens_per_s * math.exp(-noise) if plans else 0.0
    return [each for each in plans if each.score.tokens_per_s >= slowest]


def pareto(plans: Sequence[Planned]) -> list[Planned]:
    """Returns the plans that no other matches or beats in speed, staleness and length bias, the fastest first."""

    def beats(one: Planned, two: Planned) -> bool:
        better = one.score.tokens_per_s >= two.score.tokens_per_s and one.staleness_bound <= two.staleness_bound
        return better and abs(one.score.length_shift) <= abs(two.score.length_shift) + SAME_LENGTH

    front: list[Planned] = []
    for plan in sorted(plans, key=lambda each: (-each.score.tokens_per_s, each.staleness_bound)):
        if not any(beats(other, plan) for other in front):
            front.append(plan)
    return front


def list_changes(schedule: Schedule) -> dict[str, object]:
    """Returns the fields of a schedule that differ from the defaults, in the format of a schedule's file."""
    given, default = schedule.model_dump(mode="json"), Schedule().model_dump(mode="json")
    found: dict[str, object] = {name: value for name, value in given.items() if value != default[name]}
    if isinstance(placement := found.get("placement"), dict):
        found["placement"] = {role: _shorten_value(where) for role, where in placement.items() if where}
    if isinstance(tail := found.get("tail"), dict) and len(tail) == 1:
        found["tail"] = tail["kind"]
    return found


def _shorten_value(where: Mapping[str, object]) -> object:
    return where["devices"] if where.get("devices_per_instance") in (None, 1) else dict(where)
