"""Schedules that a cluster can run: they fit it and its memory, and the recipe accepts them."""

from collections.abc import Mapping

from interlace.core.errors import UserError
from interlace.forecast.profile.types import Profile
from interlace.forecast.search.bounds import Misfit, Workload, misfit
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Accepts, PlanLimits, Refused, Score, differing
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


class FeasibleSchedules:
    """The schedules of candidates, and the reasons why others have none."""

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        devices: tuple[Device, ...],
        limits: PlanLimits,
        accepts: Accepts,
    ) -> None:
        self._profile, self._workload, self._devices = profile, workload, devices
        self._limits, self._accepts = limits, accepts
        self.schedules: dict[Candidate, Schedule] = {}
        """Schedules of the feasible candidates so far."""
        self._misfits: list[Misfit] = []
        self.reasons: list[str] = []
        """Reasons why candidates cannot run, in the order of the search."""
        self.num_pruned = 0
        """Number of candidates that are not simulated."""

    def find(self, candidate: Candidate) -> Schedule | None:
        """Returns the candidate's schedule if it fits the cluster and its memory and `accepts` allows it, else None."""
        if candidate in self.schedules:
            return self.schedules[candidate]
        schedule = candidate.on(len(self._devices), self._workload.pools)
        if schedule is None:
            return None
        too_large = misfit(schedule, self._profile, self._workload, self._devices)
        reason = None if too_large else self._accepts(schedule)
        if too_large:
            self._misfits.append(too_large)
        if reason:
            self.reasons.append(reason)
        if too_large or reason:
            self.num_pruned += 1
            return None
        self.schedules[candidate] = schedule
        return schedule

    def is_inside(self, candidate: Candidate, score: Score | Refused) -> bool:
        """Returns whether a simulated candidate is within the limits of the user."""
        limits = self._limits
        return (
            isinstance(score, Score)
            and limits.refusal(self.schedules[candidate]) is None
            and -score.length_shift <= limits.max_length_shift
            and score.step_s <= limits.max_step_s
        )

    def refuse(self, seen: Mapping[Candidate, Score | Refused]) -> None:
        """Raises UserError with the reason why no plan exists. seen: scores at coarse fidelity.

        Does nothing if a candidate is within the limits.
        """
        if any(self.is_inside(each, score) for each, score in seen.items()):
            return
        limits = self._limits
        steps = {each: score.step_s for each, score in seen.items() if isinstance(score, Score)}
        if steps:
            best = min(steps, key=lambda each: steps[each])
            raise UserError(
                f"no schedule holds a step to {limits.max_step_s:.4g} s with a staleness of at most "
                f"{limits.max_staleness} versions and a length shift of at most {limits.max_length_shift:.0%}. "
                f"The best plan found takes {steps[best]:.4g} s per step: {differing(self.schedules[best])}. "
                "Allow more time or more staleness, or give more devices."
            )
        if self._misfits:
            least = min(self._misfits, key=lambda each: each.over_bytes)
            raise UserError(
                f"no plan fits into memory. In the plan that lacks least, {least.sentence}, "
                "or give more or larger devices."
            )
        if not self.reasons and self.schedules:
            raise UserError(
                "the search ended before it had simulated one schedule. Give it more time: plan.search_s=60."
            )
        first = self.reasons[0] if self.reasons else "no placement fits this number of devices"
        raise UserError(f"no schedule can run this recipe here. The first that was tried: {first}")
