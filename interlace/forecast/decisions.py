"""Choice between schedules with few simulations: at the start of a run, and between two of its steps."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

from interlace.forecast.plan import PlanRequest, RecipePlan
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.bounds import coarser, estimate_step
from interlace.forecast.search.candidates import Candidate, change_fields
from interlace.forecast.search.plans import Fidelity, Planned, Score, choose_coarse
from interlace.forecast.search.replanner import is_faster
from interlace.forecast.simulate import Simulation
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from interlace.stages.factory import LIVE

DECISION_S, DECISION_EFFORT = 0.2, 1500
"""Limit of a decision: seconds of an idle core, and the effort that they allow. A simulated sample counts 1, and each
device DEVICE_STEP in each step, because a simulated engine takes as long for few samples as for several."""
DEVICE_STEP = 10
TURN_GROWTH = 0.25
"""Additional effort of an agent's sample for each turn of its episode after the first one: contexts grow."""
LIVE_STEPS = (6, 4, 2)
"""Counted steps of a simulation: the largest number that a decision allows."""
ERRORS = 1.0
"""Standard errors that a gain must exceed. They count the steps as independent, which overstates them for asynchronous
schedules: a long step follows a short one."""
START_STEPS = 10
"""Counted steps of each simulation for the choice between tied plans."""
START_GROWTH = 2.0
"""Growth of the responses for which the first of several tied plans is chosen."""
START_SHARE = 0.25
"""Limit of the choice between tied plans, as a share of the time of the search before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveDecision:
    """A schedule, compared with the present one."""

    schedule: Schedule
    step_s: float
    """Predicted seconds of its step."""
    current_s: float
    """Predicted seconds of a step of the present schedule."""
    error: float = 0.0
    """Standard error of the logarithm of their ratio: few steps are simulated."""

    @property
    def most_ratio(self) -> float:
        """Logarithm of the ratio of both, ERRORS above its prediction."""
        return math.log(self.step_s / self.current_s) + ERRORS * self.error

    def pays(self, noise: float) -> bool:
        """Returns whether the gain exceeds the error of predictions and the noise of the profile."""
        return is_faster(self.step_s, self.current_s, noise=max(noise, ERRORS * self.error))


class LiveSearch:
    """Search among the schedules that a run can change to without a restart, in several short decisions.

    A decision takes at most DECISION_EFFORT, on the smallest model of the cluster. The results are kept for the next
    decisions, until all schedules are known or the effort of the search is used up. If a decision cannot simulate the
    present schedule, the search is done at once.
    """

    def __init__(
        self,
        request: PlanRequest,
        current: Schedule,
        earlier: Iterable[Schedule],
        *,
        is_allowed: Callable[[Schedule], bool],
        effort: int,
    ) -> None:
        """request: with the present lengths and costs. current: the schedule of the run. earlier: schedules that are
        tried first. is_allowed: returns whether the run can change to a schedule. effort: limit of all decisions.
        """
        self._request, self._workload, self._current = request, request.workload, current
        self._is_allowed, self.effort_left = is_allowed, effort
        profile, self._devices = request.simulation.profile, request.simulation.devices
        self._fidelities = [choose_coarse(self._workload, profile, steps) for steps in LIVE_STEPS]
        self._turn_effort = 1.0
        if not self._workload.num_envs:  # contexts of a robot's turns are separate
            self._turn_effort += TURN_GROWTH * max(0.0, self._workload.turns - 1)
        self._scores: dict[Schedule, Score] = {}
        self._waiting = deque[Schedule]()
        self._tried: set[Schedule] = set()
        if self._choose_fidelity(current)[1] <= DECISION_EFFORT:
            self._waiting += [current, *earlier]
            self._add_neighbours()

    @property
    def is_done(self) -> bool:
        """True if no schedule is left that the effort of the search allows to simulate."""
        return not self._waiting

    def follow(self, schedule: Schedule) -> None:
        """Continues from another schedule, to which the run has changed."""
        self._current = schedule
        self._add_neighbours()

    def decide(self) -> LiveDecision | None:
        """Simulates the next schedules. Returns the best one so far; None without a score of the present one."""
        left = DECISION_EFFORT
        while self._waiting:
            schedule = self._waiting[0]
            fidelity, effort = self._choose_fidelity(schedule)
            if left < effort <= DECISION_EFFORT:
                break
            self._waiting.popleft()
            if schedule in self._tried or effort > DECISION_EFFORT:
                continue
            self._tried.add(schedule)
            if effort > self.effort_left:
                self._waiting.clear()
            elif schedule == self._current or self._is_allowed(schedule):
                left, self.effort_left = left - effort, self.effort_left - effort
                self._simulate(schedule, fidelity)
        if self._current not in self._scores:
            self._waiting.clear()
            return None
        return min((self._compare(each) for each in self._scores), key=lambda each: each.most_ratio)

    def _compare(self, schedule: Schedule) -> LiveDecision:
        scores = self._scores[schedule], self._scores[self._current]
        error = math.hypot(*(each.error_s / each.step_s for each in scores)) if schedule != self._current else 0.0
        return LiveDecision(schedule=schedule, step_s=scores[0].step_s, current_s=scores[1].step_s, error=error)

    def _simulate(self, schedule: Schedule, fidelity: Fidelity) -> None:
        place, on_model = _make_workplace(self._request), self._on_model(schedule)
        if on_model is None:
            return
        # In a thread, because the event loop of the run is running in this one.
        with ThreadPoolExecutor(1) as thread:
            score = thread.submit(place.score, on_model, fidelity).result()
        if isinstance(score, Score):
            self._scores[schedule] = score

    def _add_neighbours(self) -> None:
        """Adds the schedules that can be reached from the present one, the fastest by the analytic estimate first."""
        settings, simulation, scale = self._request.settings, self._request.simulation, self._fidelities[0].scale
        count, pools = self._workload.on_model(scale)
        devices = replace(simulation, num_devices=count, pools=pools).devices
        prompts = self._workload.prompts_per_step // scale
        workload = replace(self._workload, num_devices=count, prompts_per_step=prompts)
        found = dict[Schedule, float]()
        for schedule in list_live(self._current, settings.max_staleness, simulation):
            if not settings.refusal(schedule) and (on_model := self._on_model(schedule)):
                found[schedule] = estimate_step(on_model, simulation.profile, workload, devices).likely_s
        self._waiting.extend(sorted(found, key=lambda each: found[each]))

    def _choose_fidelity(self, schedule: Schedule) -> tuple[Fidelity, int]:
        """Returns the closest fidelity that a decision allows, else the coarsest, and the effort of a simulation."""
        for fidelity in self._fidelities:
            num_steps, (num_devices, _) = fidelity.num_steps(schedule), self._workload.on_model(fidelity.scale)
            num_samples = fidelity.count_samples(num_steps, self._workload)
            effort = round(num_samples * self._turn_effort) + DEVICE_STEP * num_steps * num_devices
            if effort <= DECISION_EFFORT:
                break
        return fidelity, effort

    def _on_model(self, schedule: Schedule) -> Schedule | None:
        """Returns the schedule for the small model of the cluster; None if the model cannot be divided so."""
        scale = self._fidelities[0].scale
        if scale == 1:
            return schedule
        return Candidate.of(schedule, devices=self._devices).on(*self._workload.on_model(scale))


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
    fidelity = Fidelity(scale=coarser(workload)[0], steps=START_STEPS)
    rates = [0.0] * len(plans)
    stop_at_s = time.monotonic() + START_SHARE * request.settings.search_s
    for number, plan in enumerate(plans):
        schedule = plan.candidate.on(*workload.on_model(fidelity.scale))
        score = place.score(schedule, fidelity, stop_at_s=stop_at_s) if schedule else None
        if schedule and score is None:
            return plans[0]
        rates[number] = score.tokens_per_s if isinstance(score, Score) else 0.0
    return plans[rates.index(max(rates))]


def _make_workplace(request: PlanRequest, growth: float = 1.0) -> Workplace:
    """Returns the workplace of a request whose responses are longer by a factor."""
    profile = with_growth(request.simulation.profile, growth)
    return Workplace(recipe=request.recipe, simulation=replace(request.simulation, profile=profile))


def with_growth(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose responses are longer by a factor."""
    lengths = profile.lengths
    longer = {"median": lengths.median * factor, "quantiles": tuple(each * factor for each in lengths.quantiles)}
    return profile.model_copy(update={"lengths": lengths.model_copy(update=longer)})


def list_live(current: Schedule, max_staleness: int, simulation: Simulation) -> Iterator[Schedule]:
    """Yields the schedules that differ from the current one in fields that can change without a restart."""
    bounds = sorted({current.max_staleness, *(float(bound) for bound in (0, 1, 2, 4) if bound <= max_staleness)})
    changes = [*_list_preset_fields()]
    changes += [{"max_staleness": bound, "pipeline_depth": depth} for bound in bounds for depth in (None, bound / 2)]
    changes += [{"dispatch": policy} for policy in ("round_robin", "least_tokens", "longest_first", "skew_aware")]
    changes += [{"concurrency": limit} for limit in (None, 16, 32, 64, 128, "adaptive")]
    changes += [{"on_update": mode} for mode in ("drain", "abort_resume", "keep")]
    changes += [{"lend_until": share} for share in (None, 0.3, 0.6, 0.9)]
    changes += _place_fewer_engines(current, simulation)
    found = dict.fromkeys(change_fields(current, fields) for fields in changes)
    yield from (each for each in found if each and each != current)


@lru_cache(maxsize=1)
def _list_preset_fields() -> tuple[Mapping[str, object], ...]:
    """Returns the fields of each preset that can change without a restart, except the placement."""
    return tuple(load_schedule(name).model_dump(include={*LIVE} - {"placement"}) for name in preset_names())


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
