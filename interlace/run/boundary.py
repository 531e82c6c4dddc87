"""Work at the step boundaries of any run: logs, checkpoints, and the best step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from interlace.core.types import Metrics
from interlace.data.stream import PromptStream
from interlace.flows.offline_run import OfflineRun
from interlace.flows.run import PolicyRun
from interlace.flows.steps import Ended, StepResult
from interlace.observe.goodput import Ledger
from interlace.observe.jsonl import read_whole_rows
from interlace.observe.loggers import MetricsLoggers
from interlace.observe.progress import ProgressView, estimate_time_left
from interlace.observe.quiet import QuietWatch
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.best import BestKeeper
from interlace.run.callbacks import Callbacks
from interlace.run.evaluation import Evaluation
from interlace.run.failed_updates import FailedUpdates
from interlace.run.recipe.config import Recipe
from interlace.run.saving import MemoryCheckpoints, RunStart, Saver
from interlace.run.state import RunState
from interlace.run.step_trace import StepTrace
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule

StateLater: TypeAlias = Callable[[], RunState]
"""Function that returns the state of the run at the time when the function was made."""


class ScheduleChanger(Protocol):
    """Planner that changes the schedule of one run, implemented by `interlace.forecast.online.OnlinePlanner`."""

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

    def fit_devices(self, num_devices: int) -> Schedule:
        """Returns the schedule for the devices on which the run starts again."""

    def follow_devices(self, remaining: Collection[int], running: Schedule) -> None:
        """Plans for the devices that work, by index. running: the schedule of the run on all of its devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """A training job: recipe, folder, starting point, and its observers."""

    recipe: Recipe
    folder: RunFolder
    progress: ProgressView
    stop: StopSignal
    planner: ScheduleChanger | None
    start: RunStart
    memory: MemoryCheckpoints
    on_cluster: Callable[[Cluster], None]
    """Called with the cluster of each process of the run, before its workers start."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    end_step: int | None = None
    """Step after which an earlier process of this command was to end, by a callback or `best.patience`."""


class Boundary(ABC):
    """Observer of a flow that logs each step and writes checkpoints."""

    def __init__(
        self,
        job: TrainJob,
        run: PolicyRun | OfflineRun,
        saver: Saver,
        stream: PromptStream,
        *,
        logger: MetricsLoggers,
        trace: StepTrace,
        quiet: QuietWatch,
    ) -> None:
        self._job, self._run, self._saver, self._stream = job, run, saver, stream
        self._logger, self._trace, self._quiet = logger, trace, quiet
        self._recipe, self._folder, self._progress = job.recipe, job.folder, job.progress
        earlier = read_whole_rows(job.folder.metrics) if job.start.checkpoint else ()
        self._failed_updates = FailedUpdates(job.recipe.optimizer.max_failed_updates, earlier)
        self._best = BestKeeper(job.recipe.best, job.folder, saver.checkpoints, job.progress)
        self._boundary: StateLater | None = None
        """The state at the end of this process's last step."""
        self._num_updates = 0
        """Updates that had begun at the end of that step."""
        self._step_s: list[float] = []
        """Time of each step of this process."""
        self.done_steps = job.start.done_steps
        self.end_step = job.end_step
        """Step after which the run ends by a callback or `best.patience`; None for the last step of the recipe."""
        self.before: Evaluation | None = job.start.before
        self.after: Evaluation | None = None
        self.ledger = Ledger()

    @property
    def has_ended(self) -> bool:
        """Returns whether no step is left, because the last process was lost after its last step was saved."""
        return self.end_step is not None and self.done_steps >= self.end_step

    async def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, within the saver's time limit."""
        await self._saver.finish_in_time()

    async def stop(self) -> None:
        """Saves the state at the end of the last step within the saver's time limit.

        Does nothing if later updates changed the weights.
        """
        if self._boundary and self._run.num_updates == self._num_updates:
            await self._saver.save_in_time(self._boundary())
        self.measure_ledger()

    def measure_ledger(self) -> None:
        """Measures the device-seconds of the process so far, before it ends."""
        self.ledger = self._run.ledger()

    @property
    def ended(self) -> Sequence[Ended]:
        """Returns the samples that ended since the last step; none of given rows, which all end as trained."""
        return ()

    @property
    def scoring(self) -> str:
        """Returns the progress of scoring in this process, as text for the user; empty if nothing is scored."""
        return ""

    def keep_transcripts(self, ended: Sequence[Ended]) -> None:  # noqa: B027 - given rows have no transcripts
        """Writes the transcripts of samples that no step will log."""

    async def _end_step(self, step: int, measured: Metrics, boundary: StateLater, num_updates: int) -> bool:
        """Passes a step to the callbacks, logs it, and saves it if it is due. Returns False if the run ends here.

        boundary, num_updates: state at the end of the step, and the updates that had begun.
        """
        job = self._job

        async def save() -> None:
            self._logger.log(step, measured)
            await self._saver.save(boundary())

        logged = await job.callbacks.call_or_save(step, self._recipe.steps, measured, self._stream, save=save)
        metrics = measured | logged
        is_best = self._best.observe(step, metrics)
        place = self._saver.find_due(step, is_best=is_best)
        if place:
            metrics["timing_s/checkpoint"] = await self._saver.copy()
        self._step_s.append(measured["timing_s/step"])
        metrics["perf/time_left_s"] = estimate_time_left(self._step_s, self._recipe.steps - step)
        self._logger.log(step, metrics)
        self._boundary, self._num_updates = boundary, num_updates  # a loss before would save a step without metrics
        self._show_step(step, metrics)
        if len(self._step_s) == 1:
            await self._saver.delete_replaced()
        self._quiet.heard(f"step {step + 1}")
        if is_best:
            self._best.mark(step)
        if place:
            self._saver.write(boundary(), place)
        if failing := self._failed_updates.failing(measured):
            await self._saver.save(boundary())  # the failed updates did not change the weights
            self._failed_updates.refuse(failing, step)
        await self._trace.at(step + 1)
        if job.callbacks.want_stop or self._best.wants_stop:
            self.end_step = step
        return not (job.stop.requested or self.has_ended)

    @abstractmethod
    def _show_step(self, step: int, metrics: Metrics) -> None:
        """Shows a step that was logged."""

    def _log_first(self, metrics: Metrics) -> None:
        """Logs the evaluation before the first step. Raises UserError if it lacks the metric of `best`."""
        self._best.check_evaluation(metrics)
        self._logger.log_evaluation(self.done_steps, metrics)

    async def _save_last(self, state: StateLater) -> None:
        """Saves the end of the last step: before an evaluation, which may fail, so that the model is not lost."""
        if self.done_steps:
            await self._saver.save(state())
        self._failed_updates.refuse_a_run_without_updates()

    def _log_last(self, metrics: Metrics) -> None:
        self._logger.log_evaluation(self.done_steps, metrics)
        if self.done_steps and self._best.observe_final(self.done_steps, metrics):
            self._best.mark(self.done_steps)
