"""Rule of when a run that goes on is planned again, and when the new plan is worth a change. Pure."""

import math
from collections import deque
from statistics import median

RECENT = 5
"""Steps whose residuals count."""
DRIFT = 0.1
"""Change of the residual, as a share, that makes a new plan due."""
AT_MOST = 25
"""Steps after which a new plan is due whatever the residual: lengths may change while a step takes as long."""
LEAST_GAIN = 0.05
"""Share of a step's time that a change must save: below, predictions do not tell schedules apart."""
PAYS_BACK = 2.0
"""Times its own cost that a change must save in the steps that are left."""


class Replanner:
    """Residuals of the current plan, and the rule of changes.

    A plan is due at a publication, once the measured step has left the prediction by more than it had at the last plan.
    A change is made where it saves enough a step, pays its measured cost back twice, and two plans in a row ask for
    one: a single plan may follow noise.
    """

    def __init__(self, predicted_s: float) -> None:
        self.predicted_s = predicted_s
        self.switch_s = math.inf
        """Measured seconds of a change; infinite until one part of it was measured."""
        self._ratios: deque[float] = deque(maxlen=RECENT)
        self._since = 0
        self._fitted: float | None = None
        self._asked = 0

    def observe(self, step_s: float) -> float:
        """Takes in a measured step. Returns predicted against measured, less 1."""
        self._ratios.append(step_s / self.predicted_s)
        self._since += 1
        if self._fitted is None and len(self._ratios) == RECENT:
            self._fitted = self.ratio
        return self.predicted_s / step_s - 1

    @property
    def ratio(self) -> float:
        """Measured against predicted seconds of recent steps: what the profile gets wrong here; 1 until some ended."""
        return median(self._ratios) if self._ratios else 1.0

    @property
    def is_due(self) -> bool:
        """True if the residual has moved, or long enough has passed. Asked at publications."""
        if self._fitted is None or self._since < RECENT:
            return False
        return abs(math.log(self.ratio / self._fitted)) > DRIFT or self._since >= AT_MOST or self._asked > 0

    def planned(self, predicted_s: float, best_s: float, *, steps_left: int) -> bool:
        """Takes in a new plan. Returns whether to change to it.

        predicted_s: seconds of a step of the current schedule, by the profile with its lengths fitted again.
        best_s: of the new one.
        """
        saved_s = (predicted_s - best_s) * self.ratio * self.predicted_s / predicted_s
        pays = saved_s * steps_left > PAYS_BACK * self.switch_s
        wants = best_s < (1 - LEAST_GAIN) * predicted_s and pays
        self._asked = self._asked + 1 if wants else 0
        self._restart(predicted_s)
        return self._asked >= 2

    def changed(self, predicted_s: float) -> None:
        """Notes that the schedule was changed to one with this prediction."""
        self._asked = 0
        self._restart(predicted_s)

    def _restart(self, predicted_s: float) -> None:
        self.predicted_s, self._since, self._fitted = predicted_s, 0, None
        self._ratios.clear()
