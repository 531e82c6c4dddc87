"""Decisions of a run between the schedules that need no restart, in short simulations between two of its steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from interlace.core.errors import InterlaceError
from interlace.forecast.decisions import DECISION_EFFORT, DECISION_S, LiveDecision, LiveSearch
from interlace.forecast.observed import ObservedWorkload, with_lengths
from interlace.forecast.plan import PlanRequest
from interlace.forecast.search.candidates import Candidate, warm_up_steps
from interlace.forecast.search.plans import Accepts, list_changes
from interlace.forecast.search.replanner import RECENT, Replanner, is_faster
from interlace.observe.progress import ProgressView
from interlace.schedule.schedule import Schedule

REST_PER_DECISION = 20.0
"""Minimum seconds of the remaining steps for each second of all decisions in place, during which the run waits."""
FIRST_DECISIONS = 10
"""Decisions that a run must allow to decide without drift too, after its first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """State of a run at a publication."""

    request: PlanRequest
    schedule: Schedule
    steps_left: int
    earlier: Sequence[Candidate]
    """The last schedules and plans of the run, the newest last."""
    accepts: Accepts
    changes_in_place: Callable[[Schedule], bool]
    """Returns whether the run can follow a schedule without a restart."""


class DecisionsInPlace:
    """Decides after drift, and returns to the schedule before a change if its steps were faster."""

    def __init__(self, rule: Replanner, observed: ObservedWorkload) -> None:
        """rule, observed: of the run."""
        self._rule, self._observed = rule, observed
        self._search: LiveSearch | None = None
        self._has_other_costs = False
        """True if the costs or the devices have changed since the last search."""
        self._is_first = True
        """True if no search was due yet."""
        self._effort = 0
        """Effort of all searches."""
        self._before: tuple[Schedule, float] | None = None
        """Schedule before a change in place, and its seconds for a token, until the other one is measured too."""
        self.decision_s = 0.0
        """Seconds of the last decision."""

    def drop_search(self, *, is_due: bool) -> None:
        """Ends the search in progress. is_due: whether costs or devices have changed, so that another one begins."""
        self._search, self._before, self._has_other_costs = None, None, is_due

    def follow(self, before: Schedule, change: LiveDecision) -> float:
        """Continues from the schedule of a decision. Returns the seconds of a step that are expected.

        before: the schedule until now.
        """
        if self._search:
            self._search.follow(change.schedule)
            self._before = self._before or (before, self._observed.find_token_s(self._rule.num_recent))
        return self._rule.step_s * change.step_s / change.current_s  # few samples make simulated steps too short

    def decide(self, now: Situation, progress: ProgressView) -> LiveDecision | None:
        """Returns a change that pays, if one is known. A search begins after drift, and decides from the next
        publication on, until it is done.
        """
        if self._before and self._rule.num_steps >= warm_up_steps(now.schedule) + RECENT:
            (schedule, token_s), self._before = self._before, None
            return self._compare_measured(schedule, token_s, now, progress)
        try:
            if self._search:
                return self._continue(self._search, now.steps_left, progress)
            if self._has_other_costs or self._rule.has_drifted:
                self._begin(now, 1)
            elif self._is_first:
                self._begin(now, FIRST_DECISIONS)
        except InterlaceError as error:  # the run keeps its schedule
            self._search = None
            progress.say(f"no decision between schedules that need no restart: {error}")
        return None

    def _compare_measured(
        self, schedule: Schedule, token_s: float, now: Situation, progress: ProgressView
    ) -> LiveDecision | None:
        """Returns to a schedule if its measured seconds for a token were fewer than those of the present one."""
        now_s = self._observed.find_token_s(self._rule.num_recent)
        if not is_faster(token_s, now_s, noise=self._rule.noise) or not now.changes_in_place(schedule):
            return None
        self._search = None
        progress.say(
            f"changing the schedule in place: back to {list_changes(schedule)}, which was {now_s / token_s:.2f} times "
            "as fast"
        )
        return LiveDecision(schedule=schedule, step_s=token_s, current_s=now_s)

    def _continue(self, search: LiveSearch, steps_left: int, progress: ProgressView) -> LiveDecision | None:
        # The limit was computed with predicted seconds if the search began before the first steps were measured.
        search.effort_left = min(search.effort_left, self._limit_effort(steps_left))
        began_s, effort = time.perf_counter(), search.effort_left
        decision = search.decide()
        self.decision_s = time.perf_counter() - began_s
        self._effort += effort - search.effort_left
        if decision and decision.pays(self._rule.noise):
            progress.say(
                f"changing the schedule in place: {decision.current_s / decision.step_s:.2f} times as fast predicted "
                f"with {list_changes(decision.schedule)}"
            )
            return decision
        if search.is_done:
            self._search = None
        return None

    def _begin(self, now: Situation, least: int) -> None:
        """Begins a search if the remaining steps take long enough. least: number of decisions that they must allow."""
        self._has_other_costs = self._is_first = False
        self._rule.decided()
        effort = self._limit_effort(now.steps_left)
        if effort < least * DECISION_EFFORT or not now.changes_in_place(now.schedule):
            return
        simulation = now.request.simulation
        profile = with_lengths(simulation.profile, self._observed.list_lengths())
        earlier = (each.on(simulation.num_devices, simulation.pools) for each in reversed(now.earlier))
        self._search = LiveSearch(
            replace(now.request, simulation=replace(simulation, profile=profile)),
            now.schedule,
            [each for each in earlier if each and now.changes_in_place(each)],
            is_allowed=lambda each: now.changes_in_place(each) and not now.accepts(each),
            effort=effort,
        )

    def _limit_effort(self, steps_left: int) -> int:
        """Returns the effort that the remaining steps allow at their recent speed, without the effort so far."""
        decisions = self._rule.left_s(steps_left) / REST_PER_DECISION / DECISION_S
        return int(DECISION_EFFORT * decisions) - self._effort
