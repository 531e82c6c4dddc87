"""Rule that determines when a run is planned again, and when a new plan justifies a change. Pure."""

import math
from collections import deque
from statistics import fmean, median

RECENT = 5
"""Minimum number of recent steps in the residual, which is of whole periods of the schedule."""
DRIFT = 0.1
"""Relative change of the residual that makes a new plan due."""
AT_MOST = 25
"""Steps after which a plan is old: lengths may change at constant step time."""
LEAST_GAIN = 0.05
"""Minimum gain of a change, as a share of a step's time; predictions are not accurate enough for smaller gains."""
PAYS_BACK = 2.0
"""Minimum savings over the remaining steps, as a multiple of the cost of a change."""


def is_faster(step_s: float, current_s: float, *, noise: float) -> bool:
    """Returns whether the predicted gain of a change exceeds the error of predictions and the noise of the profile."""
    return math.log(current_s / step_s) > max(-math.log(1 - LEAST_GAIN), noise)


class Replanner:
    """Residuals of the current plan, and the rule for changes.

    A plan is due at a publication after the residual has changed since the last plan, or from the steps before that
    plan to those after it. The schedule changes if that saves enough per step, pays its measured cost back twice, and
    two consecutive plans recommend it: a single plan may follow noise, except after a change of the cluster.
    """

    def __init__(self, predicted_s: float, *, noise: float = 0.0, period: int = 1) -> None:
        """predicted_s: mean seconds of a step. noise: relative difference in speed that the profile cannot resolve; see
        `Profile.step_noise`. period: of the schedule, in steps, within which the steps take different times.
        """
        self.predicted_s, self.noise, self._period = predicted_s, noise, period
        self.switch_s = math.inf
        """Measured seconds of a restart; infinite until the first measurement."""
        self._ratios = _make_window(period)
        self._since = 0
        self._fitted: float | None = None
        """Ratio of the first steps after the last plan."""
        self._before: float | None = None
        """The same of the plan before. None if a difference would not show outdated lengths."""
        self._decided: float | None = None
        """The residual at the last decision in place since the last plan."""
        self._asked = 0
        self._is_outdated = False

    def observe(self, step_s: float) -> float:
        """Records a measured step. Returns predicted divided by measured, minus 1."""
        self._ratios.append(step_s / self.predicted_s)
        self._since += 1
        if self._fitted is None and self._is_full:
            self._fitted = self._residual
        return self.predicted_s / step_s - 1

    @property
    def ratio(self) -> float:
        """Mean of measured divided by predicted seconds of recent steps: the profile's error; 1 before the first step.

        A mean, as the prediction is: the steps of a period take different times, and their median misses the long ones.
        """
        return fmean(self._ratios) if self._ratios else 1.0

    @property
    def num_steps(self) -> int:
        """Number of steps since the last plan or change."""
        return self._since

    @property
    def num_recent(self) -> int:
        """Number of recent steps since the last plan or change, over which `step_s` is the mean."""
        return len(self._ratios)

    @property
    def _residual(self) -> float:
        """Median of the means of recent periods, which a single slow step does not change if a period is a step."""
        steps, period = list(self._ratios), self._period
        return median(fmean(steps[start : start + period]) for start in range(0, len(steps), period))

    @property
    def _is_full(self) -> bool:
        return len(self._ratios) == self._ratios.maxlen

    def left_s(self, steps_left: int) -> float:
        """Returns the seconds that the remaining steps take at the recent speed."""
        return steps_left * self.step_s

    @property
    def step_s(self) -> float:
        """Mean seconds of recent steps; the prediction before the first one."""
        return self.ratio * self.predicted_s

    @property
    def is_due(self) -> bool:
        """True if the residual or the cluster has changed, or a plan needs a second one. Read at publications."""
        if self._is_outdated:
            return True
        if self._fitted is None:
            return False
        drifts = abs(math.log(self._residual / self._fitted)) > DRIFT
        return drifts or self._asked > 0 or self._was_outdated

    @property
    def has_drifted(self) -> bool:
        """True if the residual has changed since the last plan and since the last decision in place."""
        before = self._fitted if self._decided is None else self._decided
        return before is not None and abs(math.log(self._residual / before)) > DRIFT

    def decided(self) -> None:
        """Records a decision between the schedules that need no restart, for the present residual."""
        self._decided = self._residual if self._fitted is not None else None  # earlier, it is of the first steps alone

    @property
    def is_old(self) -> bool:
        """True if AT_MOST steps have passed since the last plan, which is due again if lengths have changed."""
        return self._since >= AT_MOST

    @property
    def _was_outdated(self) -> bool:
        """True if the last plan left another residual than the one before it.

        A plan predicts with the lengths of the steps before it. If lengths changed just before or during the search,
        the steps after the plan are measured with other lengths, and their residual stays constant from then on.
        """
        if self._before is None or self._fitted is None:
            return False
        return abs(math.log(self._fitted / self._before)) > DRIFT

    def planned(
        self, predicted_s: float, best_s: float, *, steps_left: int, restarts: bool = True, fill_s: float = 0.0
    ) -> bool:
        """Records a new plan. Returns whether to change to it.

        predicted_s: seconds of a step of the current schedule, with the lengths fitted again. best_s: the same of the
        plan. restarts: whether the change restarts the run; else it costs nothing. fill_s: predicted seconds that the
        plan takes to fill an empty pipeline, which a restart leaves. One plan is enough without a restart, and after a
        change of the cluster.
        """
        error = self.ratio * self.predicted_s / predicted_s
        saved_s, cost_s = (predicted_s - best_s) * error, self.switch_s + fill_s * error
        pays = not restarts or saved_s * steps_left > PAYS_BACK * cost_s
        wants = is_faster(best_s, predicted_s, noise=self.noise) and pays
        self._asked = self._asked + 1 if wants else 0
        is_enough = self._asked >= (2 if restarts and not self._is_outdated else 1)
        # A second residual that differs is the profile's error at these lengths.
        self._restart_window(predicted_s, before=None if self._was_outdated else self._fitted)
        return is_enough

    def expire(self) -> None:
        """Makes a plan due at the next publication: the cluster has changed, so earlier steps show nothing about it."""
        self.keep()
        self._is_outdated = True

    def keep(self) -> None:
        """Records that a plan allowed no decision. The next one is due as after any other plan."""
        self._asked = 0
        self._restart_window(self.predicted_s)

    def changed(self, predicted_s: float, *, period: int = 1) -> None:
        """Records that the schedule changed to one with this prediction and this period, in steps."""
        self._asked, self._period, self._ratios = 0, period, _make_window(period)
        self._restart_window(predicted_s)

    def _restart_window(self, predicted_s: float, *, before: float | None = None) -> None:
        self.predicted_s, self._since, self._fitted, self._before = predicted_s, 0, None, before
        self._is_outdated, self._decided = False, None
        self._ratios.clear()


def _make_window(period: int) -> deque[float]:
    """Returns a window of whole periods, at least RECENT steps."""
    return deque(maxlen=math.ceil(RECENT / period) * period)


class CostDrift:
    """Ratio of a measured cost in recent steps to the same cost when the profile was fitted."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._fitted: float | None = None

    def observe(self, cost: float, share: float) -> None:
        """Records the cost of a step, if it has one. The median of the first steps counts as the fitted cost.

        share: seconds that the cost takes in the step, as a share of the step.
        """
        if cost > 0:
            self._recent.append((cost, share))
        if self._fitted is None and len(self._recent) == RECENT:
            self._fitted = self._now

    @property
    def _now(self) -> float:
        return median(cost for cost, _ in self._recent)

    @property
    def ratio(self) -> float:
        """Median of recent steps, relative to the fitted cost; 1 if the change is at most DRIFT of the cost or at most
        LEAST_GAIN of a step, and before both are known.
        """
        if not self._fitted:
            return 1.0
        ratio = self._now / self._fitted
        changed = median(share for _, share in self._recent) * abs(1 - 1 / ratio)
        return ratio if abs(math.log(ratio)) > DRIFT and changed > LEAST_GAIN else 1.0

    def restart(self) -> None:
        """Forgets all steps: the profile or the schedule changed."""
        self._recent.clear()
        self._fitted = None
