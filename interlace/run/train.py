"""One training run of a recipe: cluster, workers and flow, from their opening to the end or a stop."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from interlace.core.errors import InterlaceError, RestartBudgetError, StoppedError
from interlace.core.types import JSON, TerminalEvent
from interlace.data.load_sampler import create_sampler
from interlace.data.stream import PromptStream
from interlace.engines.rollout.kinds import create_kind as engine_kind_of
from interlace.engines.train.export import ADAPTER_FOLDER
from interlace.flows.policy import policy_optimization
from interlace.flows.run import RoleGroups, shares_base
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import Ledger
from interlace.observe.loggers import MetricsLoggers, open_loggers
from interlace.observe.loggers.base import RunInfo
from interlace.observe.progress import ProgressView
from interlace.observe.quiet import LOOK_EVERY_S, QuietWatch
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity
from interlace.observe.secrets import mask_secrets
from interlace.observe.stop import PATIENCE_S, StopSignal
from interlace.rewards.trial import try_reward
from interlace.rollouts.config import create_kind
from interlace.run.callbacks import Callbacks
from interlace.run.clusters.base import back_end
from interlace.run.engine_control import FOLDER, EngineControl
from interlace.run.evaluation import Evaluation
from interlace.run.evaluator import Evaluator
from interlace.run.host import Hosted, host
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.launch_services import launch_joiner
from interlace.run.online import ScheduleChanger
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.prompts import recipe_prompts, renderer_of
from interlace.run.replay import imagining, open_learning
from interlace.run.saving import CRITIC_FOLDER, Saver
from interlace.run.start import RunStart, identify_run, resumed_start
from interlace.run.step_boundary import StepBoundary, TrainJob
from interlace.run.step_trace import StepTrace
from interlace.run.warmup import warmed_model
from interlace.run.weights import join_weights
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import NoRecorder, Recorder
from interlace.runtime.trace import TraceFile


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
    planner: ScheduleChanger | None = None,
    callbacks: Callbacks | None = None,
) -> TrainReport:
    """Runs a recipe to its last step, or until `stop` is requested. The recipe was checked before.

    folder: the caller holds its RunLock. resume: goes on from the folder's newest checkpoint that is whole; where it
    has none at all, from the start. planner: may change the schedule, with which the run goes on from a checkpoint.
    callbacks: a program's functions that are called after each step.
    """
    ledger, identity = Ledger(), identify_run(recipe, folder, resume=resume)
    while True:
        checkpoints = Checkpoints(folder.checkpoints, keep=recipe.keep_checkpoints, run=identity)
        settings, _ = mask_secrets(recipe.model_dump(mode="json"))
        start = resumed_start(folder, checkpoints, progress, settings) if resume else RunStart()
        job = TrainJob(
            recipe=recipe,
            folder=folder,
            progress=progress,
            stop=stop,
            planner=planner,
            start=start,
            callbacks=callbacks or Callbacks(),
        )
        report = asyncio.run(_Session(job, checkpoints, identity, settings).train())
        ledger = ledger.plus(report.ledger)
        schedule = planner.take_change() if planner and report.was_stopped and not stop.requested else None
        if schedule is None:
            return replace(report, ledger=ledger)
        recipe, resume = set_schedule(recipe, schedule, recipe.schedule.preset), True
        folder.write_config(recipe)


class _Session:
    """One process of a run: what is opened for it, and how it ends when it is asked to stop."""

    def __init__(
        self, job: TrainJob, checkpoints: Checkpoints, identity: RunIdentity, settings: Mapping[str, JSON]
    ) -> None:
        """settings: the recipe's, secrets masked."""
        self._job, self._checkpoints, self._identity, self._settings = job, checkpoints, identity, settings
        self._recipe, self._folder, self._progress, self._stop = job.recipe, job.folder, job.progress, job.stop
        self._began_s = time.monotonic()
        self._prompts = recipe_prompts(job.recipe)
        self._quiet = QuietWatch(job.progress)
        self._boundary: StepBoundary | None = None
        """Set once the run's roles are joined."""

    async def train(self) -> TrainReport:
        """Trains from start or checkpoint to the end."""
        recipe, folder, start = self._recipe, self._folder, self._job.start
        cluster = back_end(recipe.cluster).open_cluster(recipe.cluster, recipe.schedule.resolved)
        info = RunInfo(
            name=recipe.logging.name or folder.name,
            project=recipe.logging.project,
            folder=folder.path,
            run_id=self._identity.run,
            config=self._settings,
            resumed_at=start.done_steps if start.checkpoint else None,
        )
        trace = StepTrace(cluster, folder.traces, self._progress, recipe.logging.trace_steps)
        try:
            with (
                open_loggers(info, recipe.logging.loggers, say=self._progress.say) as logger,
                cluster.timeline.recorded_by(self._recorder(cluster)),
            ):
                done_steps = await self._train(cluster, self._work(cluster, logger, trace))
        finally:
            await trace.close()
            await cluster.shutdown()
        boundary = self._boundary
        return TrainReport(
            done_steps=done_steps,
            num_steps=recipe.steps,
            before=boundary.before if boundary else start.before,
            after=boundary.after if boundary else None,
            checkpoint=self._checkpoints.latest(),
            ledger=boundary.ledger if boundary else Ledger(),
        )

    async def _train(self, cluster: Cluster, work: Coroutine[Any, Any, None]) -> int:
        """Runs the flow to its end or a stop, and saves. Returns the number of steps that are saved."""
        try:
            await self._until_stopped(cluster, work)
        except StoppedError:
            return await self._save_boundary()
        except RestartBudgetError:
            if self._boundary:
                await self._boundary.stop()
            raise
        return self._done_steps

    @property
    def _done_steps(self) -> int:
        return self._boundary.done_steps if self._boundary else self._job.start.done_steps

    async def _until_stopped(self, cluster: Cluster, work: Coroutine[Any, Any, None]) -> None:
        """Runs the flow. Raises StoppedError where a stop was asked for and no step's end came in time."""
        cluster.loop_limit_s = lambda: PATIENCE_S if self._stop.is_overdue else cluster.watchdog.hang_after_s
        cluster.spawn(self._stop_in_time(), name="stop")
        scoring = lambda: self._boundary.scoring if self._boundary else ""  # noqa: E731
        cluster.spawn(self._quiet.run(cluster.waits, scoring), name="quiet")
        try:
            await cluster.run(work)
        except InterlaceError as error:
            ended = self._boundary.ended if self._boundary else ()
            if self._boundary:
                self._boundary.keep_transcripts(ended)
            if any(entry.event == TerminalEvent.FAILED for entry in ended):
                error.add_note(f"Why samples failed: all reasons are in {self._folder.samples}.")
            raise

    async def _stop_in_time(self) -> None:
        while not self._stop.is_overdue:
            await asyncio.sleep(LOOK_EVERY_S)
        if self._boundary:
            await self._boundary.finish_saving()
        raise StoppedError("stopped before the end of the step, which did not come in time.")

    async def _save_boundary(self) -> int:
        """Returns the step that is saved: where the last step ended, if it can be. StoppedError where none is."""
        if self._boundary:
            await self._boundary.stop()
        saved = max(self._checkpoints.steps(), default=0)
        if not saved:
            raise StoppedError("stopped before there was anything to save.")
        if saved < self._done_steps:
            self._progress.say(
                f"step {self._done_steps + 1} had changed the weights: a resumed run repeats it from {saved}"
            )
        return saved

    def _recorder(self, cluster: Cluster) -> Recorder:
        if not self._recipe.logging.timeline or self._done_steps >= self._recipe.steps:
            return NoRecorder()  # of a run that has no step left, the one that is there stays
        self._folder.set_timeline_aside()
        return TraceFile(self._folder.timeline, cluster.devices)

    async def _work(self, cluster: Cluster, logger: MetricsLoggers, trace: StepTrace) -> None:
        job, prompts, recipe = self._job, self._prompts.train, self._recipe
        stream = PromptStream(prompts, recipe.seed, create_sampler(recipe.task, prompts, recipe.seed))
        if job.start.state:
            stream.restore(job.start.state.stream)
        else:
            for prompt in {prompt.source: prompt for prompt in reversed(prompts)}.values():
                trial = try_reward(recipe.task.rewards.get(prompt.source, recipe.reward), prompt)
                await cluster.outside("reward", "trial", trial)
        hosted = await self._host(cluster, stream)
        learning = open_learning(recipe, self._folder.path, job.start.checkpoint, hosted.groups)
        hosted.run.replay.learning = learning
        boundary = self._boundary = StepBoundary(
            job,
            hosted,
            Saver(cluster, self._checkpoints, hosted.groups, self._folder, learning, settings=self._settings),
            Evaluator(hosted, self._prompts.first_of_each_set(recipe.evaluation.num_prompts)),
            stream,
            logger=logger,
            trace=trace,
            quiet=self._quiet,
        )
        await hosted.run.start(boundary)
        if job.planner:
            job.planner.started(time.monotonic() - self._began_s)
        await boundary.begin()
        await policy_optimization(hosted.run)
        await boundary.finish()

    async def _host(self, cluster: Cluster, stream: PromptStream) -> Hosted:
        recipe, newest = imagining(self._recipe, self._folder.path), self._job.start.checkpoint
        prompts, abort = self._prompts, self._stop.abort_if_requested  # a warm-up is kept whole or not at all
        began_s = time.monotonic()
        initial = await warmed_model(cluster, recipe, prompts, self._progress, on_step=abort)
        self._began_s += time.monotonic() - began_s  # a start from a checkpoint finds the warm-up made
        policy = initial.model_copy(update={"path": str(newest), "tokenizer": None}) if newest else initial
        critic = newest / CRITIC_FOLDER if newest else None
        adapter = newest / ADAPTER_FOLDER if newest and recipe.actor.lora else None
        longest = len(self._prompts.longest.token_ids)
        sources = ModelSources(
            recipe=recipe, policy=policy, initial=initial, longest_prompt=longest, critic=critic, adapter=adapter,
            logs=self._folder.path / FOLDER,
        )  # fmt: skip
        groups = await launch_roles(cluster, sources)
        if newest:
            await groups.actor.load_optimizer(newest)
            if groups.critic:
                await groups.critic.load_optimizer(newest / CRITIC_FOLDER)
        await self._say_how_it_computes(groups)
        self._progress.say(await join_weights(groups, recipe))
        hosted = await host(cluster, recipe, groups, stream, resumed=self._job.start.state)
        pool = hosted.run.rollout.pool
        pool.membership.on_note = self._progress.say
        if pool.membership.may_change:
            kind, launch = engine_kind_of(recipe.rollout), partial(launch_joiner, cluster, sources)
            cluster.spawn(EngineControl(pool, self._folder.path, kind, launch).run(), name="engine control")
        return hosted

    async def _say_how_it_computes(self, groups: RoleGroups) -> None:
        report = await groups.rollout[0].report()
        self._progress.say(f"model: the engines generate with {self._recipe.model.dtype} weights (model.dtype)")
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
        reference = None if shares_base(groups) or not groups.reference else groups.reference[0]
        for name, group in (("actor", groups.actor), ("critic", groups.critic), ("reference", reference)):
            if group:
                self._progress.say(f"{name}: micro-batches are {await group.attention()}")
