"""Work at each step boundary and at the end of a training run: logs, evaluation, checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from interlace.core.payload import is_lost
from interlace.core.types import Metrics, RewardResult, TerminalEvent
from interlace.data.stream import PromptStream
from interlace.flows.step_metrics import SCORED
from interlace.flows.steps import Ended, StepResult
from interlace.observe.answers import write_answers
from interlace.observe.goodput import Ledger
from interlace.observe.jsonl import write_step
from interlace.observe.loggers import MetricsLoggers
from interlace.observe.loggers.base import LoggedSample
from interlace.observe.progress import ProgressView
from interlace.observe.quiet import QuietWatch
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.observe.transcripts import write_transcripts
from interlace.rewards.results import ACCURACY
from interlace.run.best import BestKeeper
from interlace.run.callbacks import Callbacks
from interlace.run.evaluation import Evaluation
from interlace.run.evaluator import RIGHT_FROM, Evaluator
from interlace.run.failed_updates import FailedUpdates
from interlace.run.films import keep_films
from interlace.run.host import Hosted
from interlace.run.memory_checkpoints import MemoryCheckpoints
from interlace.run.online import ScheduleChanger
from interlace.run.recipe.config import Recipe, algorithm_of, set_schedule
from interlace.run.resume import RunStart
from interlace.run.saving import Saver
from interlace.run.state import RunState, SavedGroup
from interlace.run.step_notes import StepNotes
from interlace.run.step_trace import StepTrace
from interlace.run.utilization import UtilizationMeter
from interlace.runtime.cluster import Cluster

LOGGED_SAMPLES = 32
"""Maximum number of samples in a logger's table."""


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
    """Checkpoints in shared memory."""
    on_cluster: Callable[[Cluster], None]
    """Called with the cluster of each process of the run, before its workers start."""
    callbacks: Callbacks = field(default_factory=Callbacks)


def list_solved(ended: Sequence[Ended], recipe: Recipe) -> list[tuple[str, float]]:
    """Returns, for each scored sample, the uid of its prompt and 1 if it was solved, else 0; in order of admission."""
    scored = [entry.sample for entry in ended if entry.event in SCORED and entry.sample.reward is not None]
    found = []
    for sample in sorted(scored, key=attrgetter("key")):
        reward = recipe.task.rewards.get(sample.prompt.source, recipe.reward)
        result = RewardResult(reward=sample.reward or 0.0, parts=sample.reward_parts)
        is_right = reward.is_right(result) if reward else result.reward >= RIGHT_FROM
        found.append((sample.prompt.uid, sample.reward_parts.get(ACCURACY, float(is_right))))
    return found


class StepBoundary:
    """Observer of the flow: logs each step, writes checkpoints and evaluates."""

    def __init__(
        self,
        job: TrainJob,
        hosted: Hosted,
        saver: Saver,
        evaluator: Evaluator,
        stream: PromptStream,
        *,
        logger: MetricsLoggers,
        trace: StepTrace,
        quiet: QuietWatch,
    ) -> None:
        self._job, self._hosted, self._saver, self._evaluator = job, hosted, saver, evaluator
        self._stream, self._logger, self._trace, self._quiet = stream, logger, trace, quiet
        self._recipe, self._run, self._folder, self._progress = job.recipe, hosted.run, job.folder, job.progress
        self._headline = algorithm_of(job.recipe).headline
        self._notes = StepNotes(job.recipe, job.folder, job.progress)
        self._failed_updates = FailedUpdates(job.recipe.optimizer.max_failed_updates)
        self._best = BestKeeper(job.recipe.best, job.folder, saver.checkpoints, job.progress)
        self._boundary: Callable[[], RunState] | None = None
        """Function that returns the state at the end of this process's last step."""
        self._num_updates = 0
        """Updates that had begun at the end of that step."""
        self._last_ended: Sequence[Ended] = ()
        """Samples of the last step, for loggers with tables."""
        self.utilization: UtilizationMeter | None = None
        """Meter of the model FLOPs; None leaves them out."""
        self.done_steps = job.start.done_steps
        self.before: Evaluation | None = job.start.before
        self.after: Evaluation | None = None
        self.ledger = Ledger()

    async def begin(self) -> None:
        """Evaluates the initial policy."""
        if self._evaluator.has_prompts and self._job.start.checkpoint is None:
            self.before = await self._evaluate("evaluation before")
            self._best.check_evaluation(self.before.metrics())
            self._logger.log_evaluation(self.done_steps, self.before.metrics())
        await self._trace.at(self.done_steps + 1)

    async def on_step(self, result: StepResult) -> bool:
        """Logs the step; evaluates and saves if this step is due. Returns False after a stop was requested."""
        recipe, planner = self._recipe, self._job.planner
        self.done_steps = result.step
        write_transcripts(self._folder.samples, result.step, result.ended)
        self._notes.say(result, is_unchanged=self._run.publisher.is_unchanged)
        self._stream.observe(list_solved(result.ended, self._recipe))
        # Before any wait: a sample that ends later ends in the next step, which a resumed run repeats.
        boundary, num_updates = self._state_later(), self._run.num_updates
        evaluation: Metrics = {}
        self.after = None
        if recipe.eval_every and result.step % recipe.eval_every == 0 and self._evaluator.has_prompts:
            self.after = await self._evaluate(f"evaluation after step {result.step}")
            evaluation = self.after.metrics()
        metrics = {
            **result.metrics,
            **evaluation,
            **(planner.on_step(result, self._progress) if planner else {}),
        }
        self._change_in_place()
        if self.utilization:
            trained = [entry.sample for entry in result.ended if entry.event == TerminalEvent.TRAINED]
            num_trained = sum(sample.num_total_tokens for sample in trained)
            metrics |= self.utilization.measure(metrics["perf/num_tokens"], num_trained, metrics["timing_s/step"])

        async def save() -> None:
            self._logger.log(result.step, metrics)
            await self._saver.save(boundary())

        metrics |= await self._job.callbacks.call_or_save(result.step, recipe.steps, metrics, self._stream, save=save)
        is_best = self._best.observe(result.step, metrics)
        place = self._saver.find_due(result.step, is_best=is_best)
        if place:
            metrics["timing_s/checkpoint"] = await self._saver.copy()
        self._logger.log(result.step, metrics)
        self._boundary, self._num_updates = boundary, num_updates  # a loss before would save a step without metrics
        self._last_ended = result.ended
        if evaluation:
            self._log_samples(result.step)
        self._progress.step(result.step, metrics, self._headline)
        self._quiet.heard(f"step {result.step + 1}")
        self._notes.refuse_failures(result)
        if is_best:
            self._best.mark(result.step)
        if place:
            self._saver.write(boundary(), place)
        if failing := self._failed_updates.failing(result.metrics):
            await self._saver.save(boundary())  # the failed updates did not change the weights
            self._failed_updates.refuse(failing, result.step)
        await self._trace.at(result.step + 1)
        return not (
            self._job.stop.requested or self._job.callbacks.want_stop or self._best.wants_stop or self._is_to_change
        )

    async def finish(self) -> None:
        """Saves and evaluates after the end of the flow."""
        self.ledger = self._run.ledger()
        # The state before running samples are discarded: a resumed run with more steps admits their groups again.
        last_state = self._boundary or self._state_later()
        self.keep_transcripts(self._run.finish())
        if self.done_steps:  # first, so that a failing evaluation cannot lose the model
            await self._saver.save(last_state())
        self._failed_updates.refuse_a_run_without_updates()
        if self._evaluator.has_prompts and self.after is None and not self._is_to_change:
            await self._run.publisher.install()
            self.after = await self._evaluate("evaluation after")
            self._logger.log_evaluation(self.done_steps, self.after.metrics())
            if self.done_steps and self._best.observe_final(self.done_steps, self.after.metrics()):
                self._best.mark(self.done_steps)
            self._log_samples(self.done_steps)

    async def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, within the saver's time limit."""
        await self._saver.finish_in_time()

    async def stop(self) -> None:
        """Saves the state at the end of the last step within the saver's time limit.

        Does nothing if later updates changed the weights.
        """
        if self._boundary and self._run.num_updates == self._num_updates:
            await self._saver.save_in_time(self._boundary())
        self.ledger = self._run.ledger()

    def keep_transcripts(self, ended: Sequence[Ended]) -> None:
        """Writes the transcripts of samples that no step will log."""
        if leftover := [entry for entry in ended if entry.event != TerminalEvent.TRAINED]:
            write_transcripts(self._folder.samples, self.done_steps + 1, leftover)

    @property
    def ended(self) -> Sequence[Ended]:
        """Returns the samples that ended since the last step."""
        return self._run.ended

    @property
    def scoring(self) -> str:
        """Returns the progress of scoring in this process, as text for the user."""
        return f"{self._run.scoring} so far"

    def _change_in_place(self) -> None:
        """Follows the planner's next schedule, if no restart is needed for it."""
        planner, live = self._job.planner, self._hosted.live
        if planner is None or not self._is_to_change or planner.change is None or not live.may_become(planner.change):
            return
        if schedule := planner.take_change():
            live.become(schedule)
            self._recipe = set_schedule(self._recipe, schedule, self._recipe.schedule.preset)
            self._folder.write_config(self._recipe)
            self._progress.say("the schedule changed without a restart")

    @property
    def _is_to_change(self) -> bool:
        planner = self._job.planner
        return planner is not None and planner.change is not None and self.done_steps < self._recipe.steps

    async def _evaluate(self, title: str) -> Evaluation:
        self._progress.stage(title, 0, 1)
        self._quiet.heard(title)
        evaluation = await self._evaluator.evaluate()
        self._progress.stage(title, 1, 1, f"greedy {evaluation.greedy_accuracy:.3f}")
        if evaluation.warning:
            self._progress.say(f"{title}: {evaluation.warning}")
        loggers = self._recipe.logging.loggers
        if missing := keep_films(self._hosted.filming, self._folder, self.done_steps, loggers):
            self._notes.say_once("films", missing)
        self._quiet.heard(f"step {self.done_steps + 1}")
        write_step(self._folder.evaluations, self.done_steps, evaluation.metrics())
        write_answers(self._folder.path, self.done_steps, evaluation.answers)
        return evaluation

    def _log_samples(self, step: int) -> None:
        samples = [
            LoggedSample(
                prompt=entry.sample.prompt.text, response=entry.sample.text, reward=entry.sample.reward,
                num_tokens=entry.sample.num_tokens,
            )
            for entry in self._last_ended[:LOGGED_SAMPLES]
            if not is_lost(entry.sample.segments)
        ]  # fmt: skip
        self._logger.log_samples(step, samples)

    def _state_later(self) -> Callable[[], RunState]:
        """Returns a function that makes the current state."""
        in_flight = self._run.admission.in_flight()
        groups = in_flight.groups
        stream = self._stream.state_later([*(group.prompt for group in groups), *in_flight.waiting])
        done_steps, num_groups, before = self.done_steps, self._run.num_groups, self.before

        def state() -> RunState:
            saved = (
                SavedGroup(gid=group.gid, uid=group.prompt.uid, epoch=group.prompt.attempt, ended=tuple(group.ended))
                for group in groups
            )
            return RunState(
                done_steps=done_steps, num_groups=num_groups, stream=stream(), before=before, in_flight=tuple(saved)
            )

        return state
