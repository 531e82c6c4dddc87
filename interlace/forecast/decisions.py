"""Decisions between schedules in microseconds, from step times that were simulated beforehand at several lengths."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from interlace.forecast.plan import PlanRequest, RecipePlan
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import FIRST_SAMPLE_S, TimedEffort, Workplace
from interlace.forecast.search.bounds import coarser, response_lengths
from interlace.forecast.search.candidates import change_fields
from interlace.forecast.search.plans import Accepts, Fidelity, Planned, Score
from interlace.forecast.search.replanner import is_faster
from interlace.forecast.simulate import Simulation
from interlace.schedule.schedule import Schedule

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Lengths of responses, relative to the profile, at which schedules are simulated."""
STEPS, FEW_STEPS = 10, 4
"""Counted steps of each simulation, and if a step has MANY samples."""
MANY = 512
START_GROWTH = 2.0
"""Growth of the responses for which the first of several tied plans is chosen."""
START_SHARE = 0.25
"""Limit of the choice between tied plans, as a share of the time of the search before it."""
ROUNDS = 2
"""Rounds of one change each, the second from the best schedule of the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveDecision:
    """Best schedule for the measured lengths."""

    schedule: Schedule
    step_s: float
    """Predicted seconds of its step."""
    current_s: float
    """Predicted seconds of a step of the current schedule."""

    def pays(self, noise: float) -> bool:
        """Returns whether the gain exceeds the error of predictions and the noise of the profile."""
        return is_faster(self.step_s, self.current_s, noise=noise)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionTable:
    """Seconds of a step of each schedule at each length factor."""

    lengths: tuple[float, ...]
    """Mean length of a response at FACTORS, in tokens. The recipe's limit cuts the longest responses."""
    rows: Mapping[Schedule, tuple[float, ...]]
    """Schedule -> seconds at FACTORS."""

    def decide(self, current: Schedule, mean_length: float) -> LiveDecision | None:
        """Returns the fastest schedule at a measured mean length; None if the table lacks the current one.

        Seconds between two lengths are interpolated in the logarithms of both, and kept beyond the outer ones.
        """
        if current not in self.rows:
            return None
        seconds = {schedule: _interpolate(self.lengths, row, mean_length) for schedule, row in self.rows.items()}
        best = min(seconds, key=lambda schedule: seconds[schedule])
        return LiveDecision(schedule=best, step_s=seconds[best], current_s=seconds[current])


def _interpolate(lengths: Sequence[float], row: Sequence[float], length: float) -> float:
    place = min(max(length, lengths[0]), lengths[-1])
    upper = next(index for index, each in enumerate(lengths) if place <= each)
    if upper == 0:
        return row[0]
    low, high = lengths[upper - 1], lengths[upper]
    share = math.log(place / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(row[upper - 1]) + share * math.log(row[upper]))


def make_table(request: PlanRequest, current: Schedule, *, accepts: Accepts) -> DecisionTable:
    """Simulates the current schedule and those that a run can change to without a restart, at every length factor.

    It ends after `search_s` or `search_samples` of the request, without the schedules that remain. accepts: returns the
    reason why a schedule cannot run.
    """
    rows, tried = dict[Schedule, tuple[float, ...]](), set[Schedule]()
    fidelity, _ = _size_table(request, current)
    effort = TimedEffort(request.settings.search_s, processes=1, num_samples=request.settings.search_samples)
    start = current
    for _ in range(ROUNDS):
        for schedule in list_live(start, request.settings.max_staleness, request.simulation):
            if schedule in tried:
                continue
            tried.add(schedule)
            if schedule != current and (request.settings.refusal(schedule) or accepts(schedule)):
                continue
            num_samples = _count_row(request, schedule, fidelity)
            if rows and not effort.affords(num_samples):
                continue
            if row := _simulate(request, schedule, fidelity, effort.stop_at_s):
                rows[schedule] = row
            effort.spend(num_samples)
        if not rows:
            break
        start = min(rows, key=lambda schedule: fmean(math.log(seconds) for seconds in rows[schedule]))
    profile, most = request.simulation.profile, request.recipe.sampling.max_new_tokens
    lengths = tuple(fmean(response_lengths(with_growth(profile, factor).lengths, most)) for factor in FACTORS)
    return DecisionTable(lengths=lengths, rows=rows)


def count_samples(request: PlanRequest, current: Schedule) -> int:
    """Returns the samples that make_table() simulates at most: later rounds may begin from the longest pipeline."""
    return _size_table(request, current)[1]


def _size_table(request: PlanRequest, current: Schedule) -> tuple[Fidelity, int]:
    """Returns the fidelity of a table and the samples that it simulates at most.

    The cluster is as small as possible. If the limits of the request do not allow all samples, fewer of them cost more.
    """
    workload, settings = request.workload, request.settings
    scale = coarser(workload)[0]
    whole = Fidelity(scale=scale, steps=STEPS if workload.requests_per_step < MANY else FEW_STEPS)
    listed = list_live(current, settings.max_staleness, request.simulation)
    rows = [_count_row(request, each, whole) for each in listed]
    num_samples = sum(rows) + (ROUNDS - 1) * len(rows) * max(rows)
    most = min(settings.search_samples or math.inf, settings.search_s / FIRST_SAMPLE_S)
    prompts, thinnest = workload.prompts_per_step // scale, workload.find_thinning(scale, request.simulation.profile)
    thins = [each for each in range(1, thinnest + 1) if prompts % each == 0]
    thin = next((each for each in thins if num_samples // each <= most), thins[-1])
    return replace(whole, thin=thin), num_samples // thin


def _count_row(request: PlanRequest, schedule: Schedule, fidelity: Fidelity) -> int:
    num_samples = fidelity.num_steps(schedule) * request.workload.requests_per_step // (fidelity.scale * fidelity.thin)
    return len(FACTORS) * num_samples


def choose_start(made: RecipePlan) -> Planned:
    """Returns the plan with which a run begins: of the least stale tied plans, the fastest if responses double.

    A tied plan may be faster, but the difference is within the noise of the profile, and stale samples cost accuracy.
    Responses usually grow in training, and a plan that is equal now may be much slower then. If the simulations do not
    end in START_SHARE of the time of the search, the first of the plans is returned.
    """
    request, found = made.request, made.found
    plans = [each for each in found.tied if each.staleness_bound == found.least_stale.staleness_bound]
    if len(plans) == 1:
        return plans[0]
    place = _make_workplace(request, START_GROWTH)
    workload = request.workload
    fidelity = Fidelity(scale=coarser(workload)[0], steps=STEPS)
    rates = [0.0] * len(plans)
    stop_at_s = time.monotonic() + START_SHARE * request.settings.search_s
    for number, plan in enumerate(plans):
        schedule = plan.candidate.on(*workload.on_model(fidelity.scale))
        score = place.score(schedule, fidelity, stop_at_s=stop_at_s) if schedule else None
        if schedule and score is None:
            return plans[0]
        rates[number] = score.tokens_per_s if isinstance(score, Score) else 0.0
    return plans[rates.index(max(rates))]


def _simulate(request: PlanRequest, schedule: Schedule, fidelity: Fidelity, stop_at_s: float) -> tuple[float, ...]:
    """Returns the seconds of a step at FACTORS; empty if the schedule cannot run, or not until `stop_at_s`."""
    row = []
    for factor in FACTORS:
        score = _make_workplace(request, factor).score(schedule, fidelity, stop_at_s=stop_at_s)
        if not isinstance(score, Score):
            return ()
        row.append(score.step_s)
    return tuple(row)


def _make_workplace(request: PlanRequest, growth: float) -> Workplace:
    """Returns the workplace of a request whose responses are longer by a factor."""
    profile = with_growth(request.simulation.profile, growth)
    return Workplace(recipe=request.recipe, simulation=replace(request.simulation, profile=profile))


def with_growth(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose responses are longer by a factor."""
    lengths = profile.lengths
    longer = {"median": lengths.median * factor, "quantiles": tuple(each * factor for each in lengths.quantiles)}
    return profile.model_copy(update={"lengths": lengths.model_copy(update=longer)})


def list_live(current: Schedule, max_staleness: int, simulation: Simulation) -> Iterator[Schedule]:
    """Yields the current schedule, and the ones that differ from it in fields that can change without a restart."""
    yield current
    bounds = sorted({current.max_staleness, *(float(bound) for bound in (0, 1, 2, 4) if bound <= max_staleness)})
    changes: list[Mapping[str, object]] = [
        {"max_staleness": bound, "pipeline_depth": depth}
        for bound in bounds
        for depth in sorted({min(bound, share * bound) for share in (0.5, 1.0)})
    ]
    changes += [{"dispatch": policy} for policy in ("round_robin", "least_tokens", "longest_first", "skew_aware")]
    changes += [{"concurrency": limit} for limit in (None, 16, 32, 64, 128, "adaptive")]
    changes += [{"on_update": mode} for mode in ("drain", "abort_resume", "keep")]
    changes += [{"lend_until": share} for share in (None, 0.3, 0.6, 0.9)]
    changes += _place_fewer_engines(current, simulation)
    yield from (each for fields in changes if (each := change_fields(current, fields)) and each != current)


def _place_fewer_engines(current: Schedule, simulation: Simulation) -> Iterator[Mapping[str, object]]:
    instances = current.instances("rollout", simulation.devices)
    placement = current.placement.model_dump()
    for share in (0.5, 0.75):
        kept = instances[: max(1, round(share * len(instances)))]
        # As a share of the devices, so that a smaller model of the cluster can follow it too.
        first, last = (100 * index / simulation.num_devices for index in (kept[0][0].index, kept[-1][-1].index + 1))
        if first.is_integer() and last.is_integer():
            rollout = {"devices": f"{first:.0f}-{last:.0f}%", "devices_per_instance": len(kept[0])}
            yield {"placement": {**placement, "rollout": rollout}}
