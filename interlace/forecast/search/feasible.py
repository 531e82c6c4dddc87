"""Schedules that a cluster can run: they fit it and its memory, and the recipe accepts them. Reasons for the others."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from interlace.core.errors import UserError
from interlace.forecast.profile.types import Profile
from interlace.forecast.search.bounds import Misfit, StepEstimate, Workload, misfit
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Accepts, PlanLimits, Score, WhyNot, accept_all, list_changes
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Placement, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchProblem:
    """Workload, cluster and limits of a search."""

    profile: Profile
    workload: Workload
    devices: tuple[Device, ...]
    limits: PlanLimits = PlanLimits()
    accepts: Accepts = accept_all


class FeasibleSchedules:
    """The schedules of candidates, and the reasons why others have none."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._misfit_of: dict[Placement, Misfit | None] = {}
        """Memory that each placement lacks: many candidates share one, and a large cluster has thousands of devices."""
        self.schedules: dict[Candidate, Schedule] = {}
        """Schedules of the feasible candidates so far."""
        self._misfits: list[Misfit] = []
        self.reasons: list[str] = []
        """Reasons why candidates cannot run, in the order of the search."""
        self.estimates: dict[Candidate, StepEstimate] = {}
        """Analytic estimates of feasible candidates within the user's limits."""
        self.num_pruned = 0
        """Number of candidates that are not simulated."""

    def find(self, candidate: Candidate) -> Schedule | None:
        """Returns the candidate's schedule if it fits the cluster and its memory and `accepts` allows it, else None."""
        if candidate in self.schedules:
            return self.schedules[candidate]
        problem = self._problem
        schedule = candidate.on(len(problem.devices), problem.workload.pools)
        if schedule is None:
            return None
        if schedule.placement not in self._misfit_of:
            lacking = misfit(schedule, problem.profile, problem.workload, problem.devices)
            self._misfit_of[schedule.placement] = lacking
        too_large = self._misfit_of[schedule.placement]
        reason = None if too_large else problem.accepts(schedule)
        if too_large:
            self._misfits.append(too_large)
        if reason:
            self.reasons.append(reason)
        if too_large or reason:
            self.num_pruned += 1
            return None
        self.schedules[candidate] = schedule
        return schedule

    def explain(self, candidate: Candidate) -> str:
        """Returns the reason why a candidate has no schedule."""
        problem = self._problem
        schedule = candidate.on(len(problem.devices), problem.workload.pools)
        return (schedule and problem.accepts(schedule)) or "does not fit this cluster"

    def find_excess(self, schedule: Schedule) -> str:
        """Returns the reason why a schedule exceeds the limits of the user; empty if it does not."""
        return self._problem.limits.refusal(schedule) or ""

    def is_inside(self, candidate: Candidate, score: Score) -> bool:
        """Returns whether a simulated candidate is within the limits of the user."""
        limits = self._problem.limits
        return (
            limits.refusal(self.schedules[candidate]) is None
            and -score.length_shift <= limits.max_length_shift
            and score.step_s <= limits.max_step_s
        )

    def refuse(self, seen: Mapping[Candidate, Score], refused: Mapping[Candidate, str]) -> None:
        """Raises UserError with the reason why no plan exists. Does nothing if a candidate is within the limits.

        seen: scores at coarse fidelity. refused: candidates whose simulation ended with an error.
        """
        if any(self.is_inside(each, score) for each, score in seen.items()):
            return
        if seen:
            raise UserError(self._explain_limits(seen))
        waiting = {each: found.least_s for each, found in self.estimates.items() if each not in refused}
        if waiting:
            best = min(waiting, key=lambda each: waiting[each])
            raise UserError(
                "the search ended before the simulation of one schedule did. The most promising one takes at least "
                f"{waiting[best]:.4g} s per step: {list_changes(self.schedules[best])}. Give more time "
                "with plan.search_s."
            )
        if self._misfits and not self.reasons:
            least = min(self._misfits, key=lambda each: each.over_bytes)
            raise UserError(
                f"no plan fits into memory. In the plan that lacks least, {least.sentence}, "
                "or give more or larger devices."
            )
        if self.reasons:
            (reason, count), *_ = Counter(self.reasons).most_common(1)
            raise UserError(
                f"no schedule can run this recipe here. The most frequent reason, of {count} schedules: {reason}"
            )
        raise UserError(f"no placement fits {len(self._problem.devices)} devices. Give another number of devices.")

    def _explain_limits(self, scores: Mapping[Candidate, Score]) -> str:
        """Returns the message about simulated plans, of which each exceeds a limit."""
        limits = self._problem.limits
        fair = {each: score for each, score in scores.items() if -score.length_shift <= limits.max_length_shift}
        if not fair:
            best = max(scores, key=lambda each: scores[each].length_shift)
            return (
                f"plan.max_length_shift={limits.max_length_shift:g}: no plan found keeps trained responses that long. "
                f"The closest one shortens them by {-scores[best].length_shift:.1%}: "
                f"{list_changes(self.schedules[best])}. Raise plan.max_length_shift, or give the search more time."
            )
        best = min(fair, key=lambda each: fair[each].step_s)
        needed_s, deadline_h = fair[best].step_s * limits.num_steps, limits.max_step_s * limits.num_steps / 3600
        return (
            f"plan.deadline_h={deadline_h:.4g}: {limits.num_steps} steps take {needed_s / 3600:.4g} h "
            f"with the best plan found, {fair[best].step_s:.4g} s per step instead of {limits.max_step_s:.4g}: "
            f"{list_changes(self.schedules[best])}. Set plan.deadline_h={1.05 * needed_s / 3600:.2g} or more, allow "
            "staler samples (plan.max_staleness), or give more devices."
        )


def explain_presets(
    presets: Mapping[str, Candidate],
    best: Candidate,
    scores: Mapping[Candidate, Score],
    refused: Mapping[Candidate, str],
    feasible: FeasibleSchedules,
) -> list[WhyNot]:
    """Returns the losses of each preset against the best plan; includes presets out of bounds.

    scores: at coarse fidelity. refused: candidates whose simulation ended with an error.
    """
    told, top = [], scores.get(best)
    for name, candidate in presets.items():
        if candidate == best:
            continue
        score = scores.get(candidate)
        if not score or not top:
            fits = feasible.find(candidate) is not None
            reason = "was not simulated: the time was over" if fits else feasible.explain(candidate)
            told.append(WhyNot(preset=name, ratio=None, reason=refused.get(candidate, reason)))
            continue
        if not score.tokens_per_s or not top.tokens_per_s:
            told.append(WhyNot(preset=name, ratio=None, reason="no token was trained in the simulated steps"))
            continue
        ratio = score.tokens_per_s / top.tokens_per_s
        # Device-seconds per trained token, relative to the best plan's.
        more = {bin: share / ratio - top.bins.get(bin, 0.0) for bin, share in score.bins.items()}
        loses = sorted(((bin, by) for bin, by in more.items() if by > 0.02), key=lambda pair: -pair[1])[:3]
        told.append(
            WhyNot(preset=name, ratio=ratio, loses=loses, reason=feasible.find_excess(feasible.schedules[candidate]))
        )
    return told
