"""Work at each step boundary and at the end of a training run: logs, evaluation, checkpoint, notes to the user."""

from collections.abc import Sequence
from operator import attrgetter

from interlace.core.errors import InterlaceError
from interlace.core.payload import is_lost
from interlace.core.types import Metrics, RewardResult, TerminalEvent
from interlace.data.stream import PromptStream
from interlace.flows.run import PolicyRun
from interlace.flows.step_metrics import SCORED
from interlace.flows.steps import Ended, StepResult
from interlace.observe.jsonl import write_step, write_transcripts
from interlace.observe.loggers import MetricsLoggers
from interlace.observe.loggers.base import LoggedSample
from interlace.observe.progress import ProgressView, brief
from interlace.observe.quiet import QuietWatch
from interlace.observe.run_data import write_answers
from interlace.observe.run_folder import RunFolder
from interlace.rewards.base import ACCURACY
from interlace.rewards.shaping import TASK
from interlace.run.boundary import Boundary, StateLater, TrainJob
from interlace.run.device_watch import DeviceWatch
from interlace.run.evaluation import Evaluation
from interlace.run.evaluator import RIGHT_FROM, Evaluator
from interlace.run.failed_updates import IN_A_ROW
from interlace.run.films import keep_films
from interlace.run.host import Hosted
from interlace.run.recipe.config import Recipe, algorithm_of, set_schedule
from interlace.run.saving import Saver
from interlace.run.state import RunState, SavedGroup, SavedPlaces
from interlace.run.step_trace import StepTrace
from interlace.run.utilization import UtilizationMeter

LOGGED_SAMPLES = 32
"""Maximum number of samples in a logger's table."""


def list_solved(ended: Sequence[Ended], recipe: Recipe) -> list[tuple[str, float]]:
    """Returns, for each scored sample, the uid of its prompt and 1 if it was solved, else 0; in order of admission."""
    scored = [entry.sample for entry in ended if entry.event in SCORED and entry.sample.reward is not None]
    found = []
    for sample in sorted(scored, key=attrgetter("key")):
        reward = recipe.task.rewards.get(sample.prompt.source, recipe.reward)
        result = RewardResult(reward=sample.reward or 0.0, parts=sample.reward_parts)
        is_right = reward.is_right(result) if reward else result.reward > RIGHT_FROM
        found.append((sample.prompt.uid, sample.reward_parts.get(ACCURACY, float(is_right))))
    return found


class StepBoundary(Boundary):
    """Observer of the flow: logs each step, writes checkpoints and evaluates."""

    _run: PolicyRun

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
        super().__init__(job, hosted.run, saver, stream, logger=logger, trace=trace, quiet=quiet)
        self._hosted, self._evaluator = hosted, evaluator
        self._headline = algorithm_of(job.recipe).headline
        self._notes = StepNotes(job.recipe, job.folder, job.progress)
        self._result: StepResult | None = None
        """The last step, whose samples are for loggers with tables."""
        self.utilization: UtilizationMeter | None = None
        """Meter of the model FLOPs; None leaves them out."""
        self.devices: DeviceWatch | None = None
        """Watch for devices that disappear; None without a planner."""

    async def begin(self) -> None:
        """Evaluates the initial policy."""
        if self._evaluator.has_prompts and self._job.start.checkpoint is None:
            self.before = await self._evaluate("evaluation before")
            self._log_first(self.before.metrics())
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
        is_due = recipe.schedule.resolved.is_evaluation_due(result.step, eval_every=recipe.eval_every)
        if is_due and self._evaluator.has_prompts:
            self.after = await self._evaluate(f"evaluation after step {result.step}")
            evaluation = self.after.metrics()
        if self.devices:
            membership = self._run.rollout.pool.membership
            await self.devices.look(membership.lost_devices, self._hosted.live.schedule)
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
        self._result = result
        if not await self._end_step(result.step, metrics, boundary, num_updates):
            if planner:
                planner.take_change()  # the run ends here: a change would start it again
            return False
        return not self._is_to_change

    def _show_step(self, step: int, metrics: Metrics) -> None:
        if self.after:
            self._log_samples(step)
        self._progress.step(step, metrics, self._headline)
        if self._result:
            self._notes.refuse_failures(self._result)

    async def finish(self) -> None:
        """Saves and evaluates after the end of the flow."""
        self.ledger = self._run.ledger()
        # The state before running samples are discarded: a resumed run with more steps admits their groups again.
        last_state = self._boundary or self._state_later()
        self.keep_transcripts(self._run.finish())
        await self._save_last(last_state)
        if self._evaluator.has_prompts and self.after is None and not self._is_to_change:
            await self._run.publisher.install()
            self.after = await self._evaluate("evaluation after")
            self._log_last(self.after.metrics())
            self._log_samples(self.done_steps)

    def keep_transcripts(self, ended: Sequence[Ended]) -> None:
        if leftover := [entry for entry in ended if entry.event != TerminalEvent.TRAINED]:
            write_transcripts(self._folder.samples, self.done_steps + 1, leftover)

    @property
    def ended(self) -> Sequence[Ended]:
        return self._run.ended

    @property
    def scoring(self) -> str:
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
        ended = self._result.ended if self._result else ()
        samples = [
            LoggedSample(
                prompt=entry.sample.prompt.text, response=entry.sample.text, reward=entry.sample.reward,
                num_tokens=entry.sample.num_tokens,
            )
            for entry in ended[:LOGGED_SAMPLES]
            if not is_lost(entry.sample.segments)
        ]  # fmt: skip
        self._logger.log_samples(step, samples)

    def _state_later(self) -> StateLater:
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
                done_steps=done_steps, num_groups=num_groups, stream=stream(), before=before, in_flight=tuple(saved),
                places=SavedPlaces.of(in_flight.places) if in_flight.places else None,
            )  # fmt: skip

        return state


VERDICT_STEPS = 5
"""Steps with rewards after which a reward that no answer has reached is reported."""


class StepNotes:
    """Notes of one process of a run."""

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: ProgressView) -> None:
        self._recipe, self._folder, self._progress = recipe, folder, progress
        self._told: set[str] = set()
        self._has_scored = False
        """True if this process has scored a sample."""
        self._largest_reward, self._num_scored_steps = 0.0, 0

    def say(self, result: StepResult, *, is_unchanged: bool) -> None:
        """Reports new findings of a step. is_unchanged: the step published the same weights as before."""
        self._say_failures(result)
        self._has_scored = self._has_scored or any(entry.sample.reward is not None for entry in result.ended)
        self._say_lost_minibatches(result)
        self._say_idle_weights(result)
        self._say_unreached_verdict(result)
        if is_unchanged:
            self._say_unchanged_weights(result)

    def refuse_failures(self, result: StepResult) -> None:
        """Raises InterlaceError if all samples of the first step failed, since nothing could be learned."""
        if not self._has_scored and (failed := _list_failures(result)):
            raise InterlaceError(
                f"step {result.step}: all {len(failed)} samples failed, so there is nothing to train on. The first "
                f"failed by {brief(failed[0])}; all reasons are in {self._folder.samples}."
            )

    def _say_failures(self, result: StepResult) -> None:
        """Reports the first step with failed samples; otherwise a run would only seem to learn nothing."""
        if failed := _list_failures(result):
            self.say_once(
                "failures",
                f"step {result.step}: {len(failed)} of {len(result.ended)} samples failed, the first by "
                f"{brief(failed[0])}; all reasons, of later steps too, are in {self._folder.samples}",
            )

    def _say_lost_minibatches(self, result: StepResult) -> None:
        """Reports the first step with failed updates. Minibatches that are skipped by a setting are not reported."""
        for role in ("actor", "critic", "process_reward"):
            if result.metrics.get(f"{role}/{IN_A_ROW}"):
                lost = result.metrics[f"{role}/skipped_minibatches"]
                self.say_once(
                    role,
                    f"step {result.step}: {lost:.0f} of the {role}'s minibatches had a loss or a gradient that is not "
                    f"a finite number, or a learning rate beyond all bounds, and were dropped; "
                    f"{role}/skipped_minibatches counts them",
                )

    def _say_idle_weights(self, result: StepResult) -> None:
        """Reports weights of missing reward parts at the first scored step, which shows the parts of a function."""
        if "weights" in self._told or not self._has_scored:
            return
        self._told.add("weights")
        parts = {name for entry in result.ended for name in entry.sample.reward_parts}
        weights = self._recipe.reward.shaping.weights if self._recipe.reward else {}
        if idle := [name for name in weights if name not in parts]:
            self._progress.say(
                f"step {result.step}: reward.shaping.weights names {', '.join(idle)}, and no reward has a part "
                f"of that name: its weight changes nothing. Parts are: {', '.join(sorted(parts)) or 'none'}"
            )

    def _say_unreached_verdict(self, result: StepResult) -> None:
        """Reports numbers of an own function up to 1 if held-out answers count as right from a larger number on."""
        reward = self._recipe.reward
        scored = [entry.sample for entry in result.ended if entry.sample.reward is not None]
        if reward is None or ":" not in reward.name or all(ACCURACY in sample.reward_parts for sample in scored):
            return
        rewards = (sample.reward_parts.get(TASK, sample.reward or 0.0) for sample in scored)
        most = self._largest_reward = max([self._largest_reward, *rewards])
        self._num_scored_steps += bool(scored)
        if 0 < most <= 1 < reward.correct and self._num_scored_steps >= VERDICT_STEPS:
            self.say_once(
                "verdict",
                f"step {result.step}: the largest reward so far is {most:g}, and a held-out answer counts as right "
                f"from reward.correct={reward.correct:g} on. If {most:g} is the reward of a right answer, set "
                "reward.correct to it",
            )

    def _say_unchanged_weights(self, result: StepResult) -> None:
        """Reports the first publication that did not change the engines' weights although the actor was updated."""
        metrics = result.metrics
        if metrics.get("actor/grad_norm") and not metrics.get("actor/skipped_minibatches"):
            self.say_once(
                "unchanged",
                f"step {result.step}: the actor was updated (gradient norm {metrics['actor/grad_norm']:.2g}, learning "
                f"rate {metrics['actor/lr']:.2g}), and the version that was published is to the bit the one before: "
                "each change was lost in rounding, or is not in what is published",
            )

    def say_once(self, kind: str, text: str) -> None:
        """Reports a sentence of a kind, the first time."""
        if kind not in self._told:
            self._told.add(kind)
            self._progress.say(text)


def _list_failures(result: StepResult) -> list[str]:
    return [entry.reason for entry in result.ended if entry.event == TerminalEvent.FAILED]
