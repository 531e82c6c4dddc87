"""Online planner for `schedule=auto`: compares predicted and measured step times, and plans again after drift."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from interlace.core.errors import InterlaceError
from interlace.core.types import Metrics
from interlace.flows.steps import StepResult
from interlace.forecast.decisions import LiveDecision
from interlace.forecast.in_place import DecisionsInPlace, Situation
from interlace.forecast.observed import ObservedWorkload, with_lengths
from interlace.forecast.plan import PlanRequest, RecipePlan, make_plan
from interlace.forecast.profile.types import Profile
from interlace.forecast.recipe_check import AcceptsHere
from interlace.forecast.remaining import EarlierPlans, ReducedRun, fit_schedule, leave_out_devices
from interlace.forecast.search.candidates import Candidate, period_steps
from interlace.forecast.search.plans import Accepts, Planned, list_changes
from interlace.forecast.search.replanner import Replanner
from interlace.observe.progress import ProgressView
from interlace.runtime.process.child import become_child
from interlace.runtime.process.launch import spawn_context
from interlace.schedule.schedule import Schedule

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
LOWEST = 19
"""Niceness of the search process. At equal priority, multi-threaded training that competes with a search for the cores
falls to a tenth of its speed, because its threads wait for one another."""
SEARCH_S, LONGEST_SEARCH_S = 6.0, 60.0
"""Minimum and maximum seconds of a search that runs concurrently with training."""
SEARCH_SHARE = 0.01
"""Seconds of a search for each second of the remaining steps, between these bounds: a longer run gains more by a better
plan."""
REST_PER_SEARCH = 10.0
"""Minimum seconds of the remaining steps for each second of a search. It competes with the run for the processors, so a
gain of a tenth must pay for it."""


class Pending(Protocol[T_co]):
    """Result of a job that a search process runs."""

    def ready(self) -> bool: ...

    def get(self) -> T_co: ...

    def wait(self) -> None: ...


class SearchProcess(Protocol):
    """Process that runs searches, one after another."""

    def apply_async(self, func: Callable[..., R], args: tuple[object, ...]) -> Pending[R]:
        """Starts a job, whose first argument is the request."""

    def terminate(self) -> None: ...


def open_process() -> SearchProcess:
    """Starts a search process of the lowest priority on this machine."""
    return spawn_context().Pool(1, _begin_process)


class OnlinePlanner:
    """Planner of one run. It searches in a separate process of the lowest priority while the run trains.

    The schedule changes only at publications. After drift, short simulations between the steps choose fields that need
    no restart (`interlace/forecast/decisions.py`). Any other change restarts the run, in the same process, from a
    checkpoint of that boundary: any field of the schedule may change, also placements and instances, and no training is
    lost. It must pay back the measured cost of the previous restart, and the predicted time to fill the pipeline,
    because samples in flight begin again.
    """

    def __init__(
        self,
        request: PlanRequest,
        schedule: Schedule,
        predicted_s: float,
        accepts: Accepts,
        *,
        search_s: float | None = None,
        open_process: Callable[[], SearchProcess] = open_process,
    ) -> None:
        """request: includes the user's bounds. schedule: the initial schedule. predicted_s: predicted seconds of its
        step. accepts: is sent to the search process. search_s: limit of each search, in seconds of real time; if None,
        it follows the remaining time of the run. open_process: starts the search process.
        """
        self._open_process, self._fixed_search_s = open_process, search_s
        self._request, self._accepts = request, accepts
        self._schedule, self._whole = schedule, request.simulation
        self._rule = Replanner(predicted_s, noise=request.simulation.profile.step_noise, period=period_steps(schedule))
        self._observed = ObservedWorkload()
        self._version = -1
        self._earlier = EarlierPlans()
        self._pool: SearchProcess | None = None
        self._search: Pending[RecipePlan] | None = None
        self._was_dropped = False
        """True if a change in place ended a search, which is then due again."""
        self._next: Planned | LiveDecision | None = None
        self._may_become: Callable[[Schedule], bool] = lambda _: False
        self._reduced: ReducedRun | None = None
        """The run if it continues without some devices; None with all devices."""
        self._in_place = DecisionsInPlace(self._rule, self._observed)
        self._leaving_s: float | None = None
        """Time of the decision for a restart, until the next process has started."""

    def started(self, seconds: float, may_become: Callable[[Schedule], bool] = lambda _: False) -> None:
        """Records the seconds that the run took to start, from a checkpoint or afresh: the cost of a change. After a
        restart for a change, the end of the process before it, with its checkpoint, counts too.

        may_become: returns whether the run can follow a schedule without a restart.
        """
        if self._leaving_s is not None:
            seconds, self._leaving_s = max(seconds, time.monotonic() - self._leaving_s), None
        self._rule.switch_s, self._may_become = seconds, may_become
        self._whole, self._reduced = self._request.simulation, None

    def on_step(self, result: StepResult, progress: ProgressView) -> Metrics:
        """Records a step and prints its prediction. Returns metrics; afterwards `change` is set if the run is to
        restart.
        """
        predicted_s, step_s = self._rule.predicted_s, result.metrics["timing_s/step"]
        error = self._rule.observe(step_s)
        self._observed.observe(result)
        progress.say(f"step {result.step}: predicted {predicted_s:.3g} s, measured {step_s:.3g} ({error:+.0%})")
        if result.version != self._version:
            self._version = result.version
            self._refit_costs(progress)
            steps_left = self._request.recipe.steps - result.step
            if steps_left > 1:
                self._decide_now(steps_left, progress)
            if self._next is None:
                self._at_publication(steps_left, progress)
        return {"plan/predicted_s": predicted_s, "plan/error": error, "plan/decision_s": self._in_place.decision_s}

    @property
    def change(self) -> Schedule | None:
        """The next schedule; None to keep the current one."""
        return self._count_all_devices(self._next.schedule) if self._next else None

    def take_change(self) -> Schedule | None:
        """Returns the next schedule and clears it."""
        found, self._next = self._next, None
        if found is None:
            return None
        self._earlier.keep(self._schedule, self._request.simulation.devices)
        changed = self._count_all_devices(found.schedule)
        if self._reduced:
            self._reduced = replace(self._reduced, running=changed, here=found.schedule)
        before, self._schedule = self._schedule, found.schedule
        if self._search:  # its plans are compared with the previous schedule
            self._drop_search()
            self._was_dropped = True
        if isinstance(found, LiveDecision):
            step_s = self._in_place.follow(before, found)
        else:
            step_s = found.score.step_s
            self._in_place.drop_search(is_due=False)
        self._rule.changed(step_s, period=period_steps(found.schedule))
        self._observed.rewards.restart()  # a call has the samples of a granule, which depends on the schedule
        return changed

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    def fit_devices(self, num_devices: int) -> Schedule:
        """Plans for another number of devices from now on, on which the run starts again. Returns the schedule with the
        same shares of them.
        """
        simulation = self._request.simulation
        if num_devices != simulation.num_devices and not simulation.pools:
            self._set_devices(num_devices, fit_schedule(self._schedule, simulation.devices, num_devices))
        return self._schedule

    def follow_devices(self, remaining: Collection[int], running: Schedule) -> None:
        """Plans for the remaining devices of a run that continues without the others, or with all again.

        remaining: indices. running: the schedule of the run on all of its devices.
        """
        simulation = self._whole
        devices = simulation.devices
        schedule = leave_out_devices(running, devices, remaining)
        if schedule and not simulation.pools:
            is_whole = len(remaining) == len(devices)
            self._set_devices(len(remaining), running if is_whole else schedule)
            self._reduced = (
                None
                if is_whole
                else ReducedRun(
                    running=running,
                    here=schedule,
                    remaining=tuple(sorted(remaining)),
                    devices=self._request.simulation.devices,
                )
            )

    def _set_devices(self, num_devices: int, schedule: Schedule) -> None:
        """Takes the number of devices and the schedule on them. The searches were of other devices."""
        self._earlier.keep(self._schedule, self._request.simulation.devices)
        simulation = replace(self._request.simulation, num_devices=num_devices)
        self._request, self._schedule = replace(self._request, simulation=simulation), schedule
        self._drop_search()
        self._next = None
        self._in_place.drop_search(is_due=True)
        if isinstance(self._accepts, AcceptsHere):
            self._accepts = self._accepts.on(simulation.devices)
        self._rule.expire()

    def wait(self) -> None:
        """Waits for the current search, so that every run takes the same decisions."""
        if self._search:
            self._search.wait()

    def close(self) -> None:
        if self._pool:
            self._pool.terminate()

    @property
    def _process(self) -> SearchProcess:
        """The search process, started by the first search."""
        if self._pool is None:
            self._pool = self._open_process()
        return self._pool

    def _drop_search(self) -> None:
        """Ends the search in progress: its inputs are obsolete, and it would delay the next one."""
        if self._search:
            self.close()
            self._pool = None
        self._search = None

    def _count_all_devices(self, schedule: Schedule) -> Schedule:
        """Returns a schedule with the numbers of devices that the running process has."""
        return self._reduced.count_all_devices(schedule) if self._reduced else schedule

    def _changes_in_place(self, schedule: Schedule) -> bool:
        """Returns whether the run can follow a schedule without a restart."""
        return self._may_become(self._count_all_devices(schedule))

    def _decide_now(self, steps_left: int, progress: ProgressView) -> None:
        """Decides between the schedules that need no restart."""
        now = Situation(
            request=self._request,
            schedule=self._schedule,
            steps_left=steps_left,
            earlier=self._earlier.candidates,
            accepts=self._accepts,
            changes_in_place=self._changes_in_place,
        )
        self._next = self._in_place.decide(now, progress)

    def _at_publication(self, steps_left: int, progress: ProgressView) -> None:
        if self._search is None:
            is_old = self._rule.is_old and self._observed.has_other_lengths
            is_due = self._was_dropped or self._rule.is_due or is_old
            search_s = self._fixed_search_s or limit_search(self._rule.left_s(steps_left))
            is_worth = steps_left > 1 and self._rule.left_s(steps_left) > REST_PER_SEARCH * search_s
            if is_due and is_worth:
                request = self._refit_lengths(search_s)
                self._observed.note_search()
                self._was_dropped = False
                arguments = (request, self._accepts, self._schedule, self._earlier.candidates)
                self._search = self._process.apply_async(search_again, arguments)
            return
        if not self._search.ready():
            return
        search, self._search = self._search, None
        try:
            made = search.get()
        except InterlaceError as error:  # the run keeps its schedule
            progress.say(f"planning again found nothing: {error}")
            self._observed.forget_search()
            self._rule.keep()
            return
        self._decide_change(made, steps_left, progress)

    def _decide_change(self, made: RecipePlan, steps_left: int, progress: ProgressView) -> None:
        best, current = made.found.best, made.found.current
        if current is None:  # an earlier prediction is of other lengths, and no measure of the gain
            progress.say("planning again did not predict the present schedule, which stays")
            self._observed.forget_search()
            self._rule.keep()
            return
        current_s, fill_s = current.score.step_s, best.score.fill_s
        self._earlier.keep(best.schedule, self._request.simulation.devices)
        restarts = not self._changes_in_place(best.schedule)
        if self._rule.planned(current_s, best.score.step_s, steps_left=steps_left, restarts=restarts, fill_s=fill_s):
            self._next = best
            self._leaving_s = time.monotonic() if restarts else None
            progress.say(
                f"changing the schedule{'' if restarts else ' in place'}: {current_s:.3g} s a step predicted now, "
                f"{best.score.step_s:.3g} with {list_changes(best.schedule)}"
                + (
                    f"; starting again from here takes about {self._rule.switch_s:.3g} s, and filling the pipeline "
                    f"{fill_s:.3g} s"
                    if restarts
                    else ""
                )
            )

    def _refit_lengths(self, search_s: float) -> PlanRequest:
        """Returns the request with the response lengths of recent steps. search_s: seconds of the search."""
        lengths = self._observed.list_lengths()
        self._request = _with_profile(self._request, with_lengths(self._request.simulation.profile, lengths))
        settings = self._request.settings.model_copy(update={"search_s": search_s, "search_processes": 1})
        return replace(self._request, settings=settings)

    def _refit_costs(self, progress: ProgressView) -> None:
        """Scales the profile's times of rewards and tools if they have changed; searches in progress then end without a
        decision.
        """
        for name, ratio, profile in self._observed.scale_costs(self._request.simulation.profile):
            progress.say(f"{name} take {ratio:.2f} times as long as the profile was fitted to")
            self._request = _with_profile(self._request, profile)
            self._drop_search()
            self._in_place.drop_search(is_due=True)


def limit_search(left_s: float) -> float:
    """Returns the seconds of a search, from the seconds of the remaining steps."""
    return max(SEARCH_S, min(SEARCH_SHARE * left_s, LONGEST_SEARCH_S))


def _with_profile(request: PlanRequest, profile: Profile) -> PlanRequest:
    return replace(request, simulation=replace(request.simulation, profile=profile))


def _begin_process() -> None:
    become_child()
    os.nice(LOWEST)


def search_again(request: PlanRequest, accepts: Accepts, current: Schedule, earlier: Sequence[Candidate]) -> RecipePlan:
    """Searches for a schedule in the search process."""
    return make_plan(request, accepts=accepts, current=current, earlier=earlier)
