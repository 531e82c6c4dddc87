"""One training run of a recipe: cluster, workers, flow, and what is done at each step boundary."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlace.core.errors import InterlaceError, StoppedError, UserError
from interlace.core.types import Metrics, Prompt, TerminalEvent
from interlace.data.stream import PromptStream
from interlace.engines.train.export import ADAPTER_FOLDER
from interlace.episodes.config import create_kind
from interlace.flows.policy import policy_optimization
from interlace.flows.run import Ended, PolicyRun, RoleGroups, StepResult, shares_base
from interlace.jobs.assemble import assemble
from interlace.jobs.evaluation import Evaluation, Evaluator
from interlace.jobs.failed_updates import FailedUpdates
from interlace.jobs.films import keep_films
from interlace.jobs.launch import ModelSources, launch_roles
from interlace.jobs.online import OnlinePlanner
from interlace.jobs.plan import under
from interlace.jobs.saving import CRITIC_FOLDER, Saver, open_learning
from interlace.jobs.state import RunState
from interlace.jobs.step_notes import StepNotes
from interlace.jobs.step_trace import StepTrace
from interlace.jobs.warmup import warmed_model
from interlace.jobs.weights import join_weights
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import Ledger
from interlace.observe.jsonl import to_line, truncate_after
from interlace.observe.loggers import MetricsLoggers, open_loggers
from interlace.observe.loggers.base import RunInfo
from interlace.observe.progress import ProgressView
from interlace.observe.quiet import LOOK_EVERY_S, QuietWatch
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import PATIENCE_S, StopSignal
from interlace.observe.transcripts import write_transcripts
from interlace.recipes.clusters.base import back_end
from interlace.recipes.config import Recipe, algorithm_of
from interlace.recipes.prompts import recipe_prompts, renderer_of
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import NoRecorder, Recorder
from interlace.runtime.trace import TraceFile

SAVE_WITHIN_S = 15.0
"""For a checkpoint to be written, where a run that was asked to stop did not come to the end of its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """Outcome of a run."""

    done_steps: int
    num_steps: int
    before: Evaluation | None
    after: Evaluation | None
    checkpoint: Path | None
    """The newest."""
    ledger: Ledger = Ledger()
    """Ledger of the device-seconds of this process, its start included, the evaluation at the end not."""

    @property
    def was_stopped(self) -> bool:
        """Returns whether the run ended before its last step, at a step boundary, with a checkpoint."""
        return self.done_steps < self.num_steps


def train(
    recipe: Recipe,
    folder: RunFolder,
    *,
    resume: bool,
    progress: ProgressView,
    stop: StopSignal,
    planner: OnlinePlanner | None = None,
) -> TrainReport:
    """Runs a recipe to its last step, or until `stop` is requested. The recipe was checked before.

    folder: the caller holds its RunLock. resume: goes on from the folder's newest checkpoint that is whole; where it
    has none at all, from the start. planner: may change the schedule, with which the run goes on from a checkpoint.
    """
    ledger = Ledger()
    while True:
        report = asyncio.run(_Session(recipe, folder, progress, stop, planner).train(resume=resume))
        ledger = ledger.plus(report.ledger)
        schedule = planner.take_change() if planner and report.was_stopped and not stop.requested else None
        if schedule is None:
            return replace(report, ledger=ledger)
        recipe, resume = under(recipe, schedule, recipe.schedule.preset), True
        folder.write_config(recipe)


class _Session:
    """Observes the flow: each step is logged, and may be checkpointed and evaluated."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        progress: ProgressView,
        stop: StopSignal,
        planner: OnlinePlanner | None,
    ) -> None:
        self._recipe, self._folder, self._progress, self._stop = recipe, folder, progress, stop
        self._planner, self._began_s = planner, time.monotonic()
        self._checkpoints = Checkpoints(folder.checkpoints, keep=recipe.keep_checkpoints)
        self._prompts = recipe_prompts(recipe)
        self._stream = PromptStream(self._prompts.train, recipe.seed)
        self._resumed: RunState | None = None
        """State of the run in the checkpoint that the run goes on from; None for a run that starts."""
        self._done_steps = 0
        self._before: Evaluation | None = None
        self._after: Evaluation | None = None
        self._ledger = Ledger()
        self._notes = StepNotes(recipe, folder, progress)
        self._boundary: Callable[[], RunState] | None = None
        """The state at the end of the last step of this process."""
        self._num_updates = 0
        """Begun until then."""
        self._failed_updates = FailedUpdates(recipe.optimizer.max_failed_updates)
        self._quiet = QuietWatch(progress)
        self._is_assembled = False
        self._cluster: Cluster
        self._trace: StepTrace
        self._logger: MetricsLoggers
        self._groups: RoleGroups
        self._saver: Saver
        self._run: PolicyRun
        self._evaluator: Evaluator

    async def train(self, *, resume: bool) -> TrainReport:
        """Trains from start or checkpoint to the end."""
        newest = self._restore() if resume else None
        cluster = self._cluster = back_end(self._recipe.cluster).open_cluster(
            self._recipe.cluster, self._recipe.schedule.resolved
        )
        info = RunInfo(
            name=self._folder.name,
            folder=self._folder.path,
            config=self._recipe.model_dump(mode="json"),
            resumed_at=self._done_steps if resume else None,
        )
        self._trace = StepTrace(cluster, self._folder.traces, self._progress, self._recipe.logging.trace_steps)
        try:
            with (
                open_loggers(info, self._recipe.logging.loggers) as self._logger,
                cluster.timeline.recorded_by(self._recorder()),
            ):
                try:
                    await self._until_stopped(self._work(newest))
                except StoppedError:
                    await self._save_boundary()
        finally:
            await self._trace.close()
            await cluster.shutdown()
        return TrainReport(
            done_steps=self._done_steps,
            num_steps=self._recipe.steps,
            before=self._before,
            after=self._after,
            checkpoint=self._checkpoints.latest(),
            ledger=self._ledger,
        )

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the flow. Raises StoppedError where a stop was asked for and no step's end came in time."""
        cluster = self._cluster
        cluster.loop_limit_s = lambda: PATIENCE_S if self._stop.is_overdue else cluster.watchdog.hang_after_s
        cluster.spawn(self._stop_in_time(), name="stop")
        cluster.spawn(self._quiet.run(cluster.waits, self._scoring), name="quiet")
        try:
            await cluster.run(work)
        except InterlaceError as error:
            ended = self._run.ended if self._is_assembled else ()
            self._keep_transcripts(ended)
            if any(entry.event == TerminalEvent.FAILED for entry in ended):
                error.add_note(f"Why samples failed: all reasons are in {self._folder.samples}.")
            raise

    async def _stop_in_time(self) -> None:
        while not self._stop.is_overdue:
            await asyncio.sleep(LOOK_EVERY_S)
        if self._is_assembled:
            await asyncio.wait({asyncio.ensure_future(self._saver.finish())}, timeout=SAVE_WITHIN_S)
        raise StoppedError("stopped before the end of the step, which did not come in time.")

    async def _save_boundary(self) -> None:
        """Saves where the last step ended, unless the weights have moved on. StoppedError where nothing is saved."""
        if self._boundary and self._run.num_updates == self._num_updates:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_WITHIN_S):
                    await self._saver.save(self._boundary())
        saved = max(self._checkpoints.steps(), default=0)
        if not saved:
            raise StoppedError("stopped before there was anything to save.")
        if saved < self._done_steps:
            self._progress.say(
                f"step {self._done_steps + 1} had changed the weights: a resumed run repeats it from {saved}"
            )
        self._done_steps = saved
        if self._is_assembled:
            self._ledger = self._run.ledger()

    def _scoring(self) -> str:
        return f"{self._run.scoring} so far" if self._is_assembled else ""

    def _keep_transcripts(self, ended: Sequence[Ended]) -> None:
        """Writes the transcripts of samples that no step will log."""
        if leftover := [entry for entry in ended if entry.event != TerminalEvent.TRAINED]:
            write_transcripts(self._folder.samples, self._done_steps + 1, leftover)

    def _recorder(self) -> Recorder:
        if not self._recipe.logging.timeline or self._done_steps >= self._recipe.steps:
            return NoRecorder()  # of a run that has no step left, the one that is there stays
        self._folder.set_timeline_aside()
        return TraceFile(self._folder.timeline, self._cluster.devices)

    def _restore(self) -> Path | None:
        newest = self._newest_whole()
        state = self._resumed = RunState.read(newest) if newest else None
        for lost in self._folder.return_to(state.done_steps if state else 0, newest):
            self._progress.say(lost)
        if state:
            self._done_steps, self._before = state.done_steps, state.before
            self._stream.restore(state.stream)
            self._progress.say(f"resuming after step {state.done_steps} from {newest}")
        return newest

    def _newest_whole(self) -> Path | None:
        """Sets newer checkpoints that are damaged aside, and says so. UserError where all are."""
        found = self._checkpoints.newest_whole()
        damage = [f"{path} {reason}" for path, reason in found.damaged.items()]
        if damage and found.path is None:
            raise UserError(
                f"run {self._folder.name!r} has no whole checkpoint to go on from: {'; '.join(damage)}. Start it again "
                "without --resume: with --overwrite, or under another name (--name)."
            )
        for path, sentence in zip(found.damaged, damage, strict=True):
            self._progress.say(f"{sentence}; set aside as {self._checkpoints.set_aside(path).name}")
        return found.path

    async def _work(self, newest: Path | None) -> None:
        await self._assemble(newest)
        await self._run.start()
        if self._planner:
            self._planner.started(time.monotonic() - self._began_s)
        if self._evaluator.has_prompts and newest is None:
            self._before = await self._evaluate("evaluation before")
        await self._trace.at(self._done_steps + 1)
        await policy_optimization(self._run)
        self._ledger = self._run.ledger()
        # Before what is in flight is given up: a resumed run with more steps starts with these prompts.
        unfinished = self._run.unconsumed_prompts()
        self._keep_transcripts(self._run.finish())
        if self._done_steps:  # first: nothing that is asked of the model now may cost it
            await self._saver.save(self._state_later(unfinished)())
        self._failed_updates.refuse_a_run_without_updates()
        if self._evaluator.has_prompts and self._after is None and not self._is_to_change:
            await self._run.install_weights()
            self._after = await self._evaluate("evaluation after")

    async def _assemble(self, newest: Path | None) -> None:
        recipe, cluster = self._recipe, self._cluster
        prompts, abort = self._prompts.train, self._stop.abort_if_requested  # a warm-up is kept whole or not at all
        began_s = time.monotonic()
        initial = await warmed_model(cluster, recipe, prompts, self._progress, on_step=abort)
        self._began_s += time.monotonic() - began_s  # a start from a checkpoint finds the warm-up made
        policy = initial.model_copy(update={"path": str(newest), "tokenizer": None}) if newest else initial
        critic = newest / CRITIC_FOLDER if newest else None
        adapter = newest / ADAPTER_FOLDER if newest and recipe.actor.lora else None
        longest = len(self._prompts.longest.token_ids)
        sources = ModelSources(
            recipe=recipe, policy=policy, initial=initial, longest_prompt=longest, critic=critic, adapter=adapter
        )
        self._groups = await launch_roles(cluster, sources)
        learning = open_learning(recipe, self._folder.path, newest)
        self._saver = Saver(cluster, self._checkpoints, self._groups, self._folder, learning)
        if newest:
            await self._groups.actor.load_optimizer(newest)
            if self._groups.critic:
                await self._groups.critic.load_optimizer(newest / CRITIC_FOLDER)
        await self._say_how_it_computes()
        self._progress.say(await join_weights(self._groups, recipe))
        ready = await assemble(
            cluster, recipe, algorithm_of(recipe), self._groups, self._stream, self, resumed=self._resumed
        )
        self._run, self._filming = ready.run, ready.filming
        self._run.replay.learning = learning
        self._is_assembled = True
        self._evaluator = Evaluator(recipe, ready.sampling, self._prompts.heldout, self._run, self._groups.reward)

    async def _say_how_it_computes(self) -> None:
        report = await self._groups.rollout[0].report()
        invariant = "does not depend" if report.invariant else "depends"
        self._progress.say(
            f"rollout: {report.attention}; a sample {invariant} on what shares its batch ({report.reason})"
        )
        for note in report.notes:
            self._progress.say(f"rollout: {note}")
        renderer = renderer_of(self._recipe)
        for note in renderer.notes if renderer else ():
            self._progress.say(f"renderer: {note}")
        episodes = (self._recipe.episode, *self._recipe.episode.others.values())
        for note in dict.fromkeys(note for episode in episodes for note in create_kind(episode).notes()):
            self._progress.say(note)
        groups = self._groups
        reference = None if shares_base(groups) or not groups.reference else groups.reference[0]
        for name, group in (("actor", groups.actor), ("critic", groups.critic), ("reference", reference)):
            if group:
                self._progress.say(f"{name}: micro-batches are {await group.attention()}")

    async def on_step(self, result: StepResult) -> bool:
        """Logs the step; evaluates and saves where it is time. Returns False after a stop was requested."""
        recipe = self._recipe
        self._done_steps = result.step
        write_transcripts(self._folder.samples, result.step, result.ended)
        self._notes.say(result, is_unchanged=self._run.publisher.is_unchanged)
        evaluation: Metrics = {}
        self._after = None
        if recipe.eval_every and result.step % recipe.eval_every == 0 and self._evaluator.has_prompts:
            self._after = await self._evaluate(f"evaluation after step {result.step}")
            evaluation = self._after.metrics()
        metrics = {
            **result.metrics,
            **evaluation,
            **(self._planner.on_step(result, self._progress) if self._planner else {}),
        }
        self._boundary = self._state_later(self._run.unconsumed_prompts())
        self._num_updates = self._run.num_updates
        state = None
        if recipe.checkpoint_every and result.step % recipe.checkpoint_every == 0:
            state = self._boundary()
            metrics["timing_s/checkpoint"] = await self._saver.copy()
        self._logger.log(result.step, metrics)
        self._progress.step(result.step, metrics)
        self._quiet.heard(f"step {result.step + 1}")
        self._notes.refuse_failures(result)
        if state:
            self._saver.write(state)
        if failing := self._failed_updates.failing(result.metrics):
            await self._saver.save(self._boundary())  # no update since the last good one changed anything
            self._failed_updates.refuse(failing, result.step)
        await self._trace.at(result.step + 1)
        return not self._stop.requested and not self._is_to_change

    @property
    def _is_to_change(self) -> bool:
        return self._planner is not None and self._planner.change is not None and self._done_steps < self._recipe.steps

    async def _evaluate(self, title: str) -> Evaluation:
        self._progress.stage(title, 0, 1)
        self._quiet.heard(title)
        evaluation = await self._evaluator.evaluate()
        self._progress.stage(title, 1, 1, f"greedy {evaluation.greedy_accuracy:.3f}")
        if evaluation.warning:
            self._progress.say(f"{title}: {evaluation.warning}")
        if missing := keep_films(self._filming, self._folder, self._done_steps, self._recipe.logging.loggers):
            self._notes.say_once("films", missing)
        self._quiet.heard(f"step {self._done_steps + 1}")
        truncate_after(self._folder.evaluations, self._done_steps - 1)  # a resumed run may repeat the last one
        with self._folder.evaluations.open("a", encoding="utf-8") as file:
            file.write(to_line({"step": self._done_steps, **evaluation.metrics()}))
        return evaluation

    def _state_later(self, unfinished: Sequence[Prompt]) -> Callable[[], RunState]:
        """Returns a function that gives the state of now. unfinished: prompts that were drawn and not trained on."""
        stream = self._stream.state_later(unfinished)
        done_steps, num_groups, before = self._done_steps, self._run.num_groups, self._before
        return lambda: RunState(done_steps=done_steps, num_groups=num_groups, stream=stream(), before=before)
