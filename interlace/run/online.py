"""Interface of a planner that changes the schedule of a run while it trains."""

from typing import Protocol

from interlace.core.types import Metrics
from interlace.flows.steps import StepResult
from interlace.observe.progress import ProgressView
from interlace.schedule.schedule import Schedule


class ScheduleChanger(Protocol):
    """Planner of one run, implemented by `interlace.forecast.online.OnlinePlanner`."""

    def started(self, seconds: float) -> None:
        """Records the start-up time of the run, in seconds, which is the cost of a change of schedule."""
        ...

    def on_step(self, result: StepResult, progress: ProgressView) -> Metrics:
        """Records a finished step and returns metrics of the prediction."""
        ...

    @property
    def change(self) -> Schedule | None:
        """The schedule to continue with; None if the current one stays."""
        ...

    def take_change(self) -> Schedule | None:
        """Returns the schedule to continue with, once."""
        ...
