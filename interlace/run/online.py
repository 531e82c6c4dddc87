"""Interface of a planner that changes the schedule of a run while it trains."""

from collections.abc import Callable
from typing import Protocol

from interlace.core.types import Metrics
from interlace.flows.steps import StepResult
from interlace.observe.progress import ProgressView
from interlace.schedule.schedule import Schedule


class ScheduleChanger(Protocol):
    """Planner of one run, implemented by `interlace.forecast.online.OnlinePlanner`."""

    def started(self, seconds: float, may_become: Callable[[Schedule], bool]) -> None:
        """Records the start-up time of the run, in seconds, which is the cost of a change that needs a restart.

        may_become: returns whether the run can follow a schedule without a restart.
        """

    @property
    def schedule(self) -> Schedule:
        """The current schedule."""

    def on_step(self, result: StepResult, progress: ProgressView) -> Metrics:
        """Records a finished step and returns metrics of the prediction."""

    @property
    def change(self) -> Schedule | None:
        """The schedule to continue with; None if the current one stays."""

    def take_change(self) -> Schedule | None:
        """Returns the schedule to continue with, once."""
