"""One training run of a recipe: cluster, workers and flow, from their opening to the end, a stop or a restart."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from interlace.core.errors import InterlaceError, PayloadLostError, RemoteError, WorkerDiedError, first_line
from interlace.core.host_memory import frozen_heap
from interlace.core.recovery import RecoveryConfig, RestartBudget, is_infrastructure_error
from interlace.data.mixture import create_sampler
from interlace.data.stream import PromptStream
from interlace.engines.rollout.kinds import create_kind as engine_kind_of
from interlace.engines.rollout.services.adoption import end_unused_servers
from interlace.flows.policy import policy_optimization
from interlace.flows.run import RoleGroups
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import Ledger
from interlace.observe.loggers import MetricsLoggers
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import RunIdentity
from interlace.observe.secrets import mask_secrets
from interlace.observe.stop import StopSignal
from interlace.robots.replay.learning import TrajectoryLearner
from interlace.rollouts.config import create_kind
from interlace.run.boundary import ScheduleChanger, TrainJob
from interlace.run.callbacks import Callbacks
from interlace.run.clusters.base import back_end
from interlace.run.device_watch import DeviceWatch
from interlace.run.engine_control import EngineControl
from interlace.run.evaluator import Evaluator
from interlace.run.host import Hosted, host
from interlace.run.launch_services import fix_addresses, launch_joiner
from interlace.run.offline import OfflineSession
from interlace.run.recipe.config import Recipe, is_offline, set_schedule
from interlace.run.recipe.prompts import renderer_of
from interlace.run.replay import make_demonstrations, open_learning, read_world_models
from interlace.run.reward_trial import try_rewards
from interlace.run.robot_spaces import store_spaces
from interlace.run.saving import MemoryCheckpoints, RunStart, Saver, find_resumed_start, identify_run
from interlace.run.session import RunProcess, TrainReport
from interlace.run.step_boundary import StepBoundary
from interlace.run.step_trace import StepTrace
from interlace.run.utilization import UtilizationMeter
from interlace.run.weights import join_weights
from interlace.runtime.cluster import Cluster, record_work


def train(
    recipe: Recipe,
    folder: RunFolder,
    *,
    resume: bool,
    progress: ProgressView,
    stop: StopSignal,
    planner: ScheduleChanger | None = None,
    callbacks: Callbacks | None = None,
    on_cluster: Callable[[Cluster], None] | None = None,
) -> TrainReport:
    """Trains a recipe to its last step, or until `stop` is requested. The recipe must have been checked.

    folder: the caller holds its RunLock. resume: continues from the folder's newest complete checkpoint, or from the
    start if the folder has no checkpoint. planner: may change the schedule; the run then continues from a checkpoint.
    callbacks: a program's functions that are called after each step. After a restart (recovery.restarts_per_hour), they
    are called again for the repeated steps. on_cluster: called with each cluster of the run, before its workers start.
    """
    identity = identify_run(recipe, folder, resume=resume)
    store_spaces(recipe, folder)
    with contextlib.closing(MemoryCheckpoints(recipe.recovery.memory_checkpoint_every, identity)) as memory:
        opened: list[Cluster] = []

        def note_cluster(cluster: Cluster) -> None:
            opened[:] = [cluster]
            if on_cluster:
                on_cluster(cluster)

        first = TrainJob(
            recipe=recipe,
            folder=folder,
            progress=progress,
            stop=stop,
            planner=planner,
            start=RunStart(),
            memory=memory,
            callbacks=callbacks or Callbacks(),
            on_cluster=note_cluster,
        )
        try:
            return _train_with_restarts(first, identity, resume=resume)
        finally:
            if opened:  # a refused command leaves the servers for one that is accepted
                end_unused_servers(folder.engines, ())  # of ranks on Ray that were killed


def _train_with_restarts(first: TrainJob, identity: RunIdentity, *, resume: bool) -> TrainReport:
    """Runs processes of a run until its end, each but the first from the checkpoint of the one before."""
    recipe, folder, progress = first.recipe, first.folder, first.progress
    stop, planner, memory = first.stop, first.planner, first.memory
    ledger, restarts = Ledger(), RunRestarts(recipe.recovery)
    end_step: int | None = None
    while True:
        checkpoints = Checkpoints(folder.checkpoints, keep=recipe.keep_checkpoints, run=identity)
        settings, _ = mask_secrets(recipe.model_dump(mode="json"))
        start = RunStart()
        if resume:
            samples = not is_offline(recipe)
            start = find_resumed_start(folder, checkpoints, memory, progress, settings, has_samples=samples)
        job = replace(first, recipe=recipe, start=start, end_step=end_step)
        session: RunProcess = (
            OfflineSession(job, checkpoints, identity, settings)
            if is_offline(recipe)
            else _PolicySession(job, checkpoints, identity, settings)
        )
        try:
            report: TrainReport | None = asyncio.run(session.train())
        except (*LOSSES, RemoteError) as error:
            if stop.requested or not restarts.allow(error, session.done_steps):
                raise
            progress.say(f"{describe_loss(error)} The run starts again from its newest checkpoint.")
            report = None
        ledger = ledger.plus(session.ledger)
        if report is None:
            resume, end_step = True, session.end_step
            if planner:  # the schedule may have changed in place, and devices may be gone
                planner.take_change()  # this restart serves for a planned one
                recipe = _fit_schedule(recipe, planner)
                folder.write_config(recipe)
            del session
            gc.collect()  # the failed process holds models in reference cycles, and its error held its frames
            continue
        schedule = planner.take_change() if planner and report.was_stopped and not stop.requested else None
        if planner is None or schedule is None:
            return replace(report, ledger=ledger, was_interrupted=report.was_stopped and stop.requested)
        recipe, resume = _fit_schedule(recipe, planner), True
        folder.write_config(recipe)


def _fit_schedule(recipe: Recipe, planner: ScheduleChanger) -> Recipe:
    """Returns the recipe with the planner's schedule, for the devices that a new process of the run finds."""
    num_devices = len(back_end(recipe.cluster).find_devices(recipe.cluster))
    return set_schedule(recipe, planner.fit_devices(num_devices), recipe.schedule.preset)


class _PolicySession(RunProcess):
    """One process of a run that trains on samples of its policy."""

    async def _work(self, cluster: Cluster, logger: MetricsLoggers, trace: StepTrace) -> None:
        job, prompts, recipe = self._job, self._prompts.train, self._recipe
        sampler = create_sampler(recipe.task, prompts, recipe.seed)
        stream = PromptStream(prompts, recipe.seed, sampler, generated=recipe.task.generated_sources)
        if job.start.state:
            stream.restore(job.start.state.stream)
        else:
            await record_work(cluster, "reward", "trial", try_rewards(recipe, prompts))
        hosted = await self._host_flow(cluster, stream)
        shown = await make_demonstrations(cluster, recipe, prompts)
        learning = open_learning(recipe, self._folder.path, job.start.checkpoint, hosted.groups, shown)
        if learning:
            flow = hosted.run
            flow.replay.learner = TrajectoryLearner(learning, hosted.groups.actor, flow.needs, lambda: flow.version)
        boundary = self._boundary = StepBoundary(
            job,
            hosted,
            Saver(
                cluster,
                self._checkpoints,
                hosted.groups,
                self._folder,
                learning,
                every=recipe.checkpoint_every,
                memory=job.memory,
                settings=self._settings,
            ),
            Evaluator(hosted, self._prompts.first_of_each_set(recipe.evaluation.num_prompts)),
            stream,
            logger=logger,
            trace=trace,
            quiet=self._quiet,
        )
        boundary.utilization = UtilizationMeter.create(recipe, cluster.devices)
        if job.start.checkpoint is None:
            await self._learn_offline(hosted)
        await hosted.run.start(boundary)
        if job.planner:
            job.planner.started(time.monotonic() - self._began_s, hosted.live.may_become)
            find_devices = partial(back_end(recipe.cluster).find_devices, recipe.cluster)
            boundary.devices = DeviceWatch(job.planner, len(cluster.devices), lambda: len(find_devices()))
        await boundary.begin()
        if not boundary.has_ended:
            with frozen_heap():
                await policy_optimization(hosted.run)
        await boundary.finish()

    async def _learn_offline(self, hosted: Hosted) -> None:
        """Makes the updates of an off-policy algorithm that come before the first step."""
        found = await hosted.run.replay.learn_offline()
        if found:
            shown = ", ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in found.items())
            self._progress.say(f"offline updates from the demonstrations are done: {shown}")

    async def _host_flow(self, cluster: Cluster, stream: PromptStream) -> Hosted:
        recipe = fix_addresses(read_world_models(self._recipe, self._folder.path))
        groups, sources = await self._launch(cluster, recipe, len(self._prompts.longest.token_ids))
        await self._report_computation(groups)
        self._progress.say(await join_weights(groups, recipe))
        resumed = self._job.start.state
        hosted = await host(cluster, recipe, groups, stream, resumed=resumed)
        if resumed:
            places = resumed.places.read() if resumed.places else None
            hosted.run.admission.resumed.add(resumed.draw_groups(stream), places)
        pool = hosted.run.rollout.pool
        hosted.run.redraws.notes.follow(self._progress.say)
        pool.membership.notes.follow(self._progress.say)
        if pool.membership.rules.may_change:
            kind, launch = engine_kind_of(self._recipe.rollout), partial(launch_joiner, cluster, sources)
            most, urls = len(cluster.place("rollout")), getattr(recipe.rollout, "urls", ())
            control = EngineControl(pool, self._folder.engines, kind, launch, most_engines=most, urls=urls)
            cluster.spawn(control.run(), name="engine control")
        return hosted

    async def _report_computation(self, groups: RoleGroups) -> None:
        reports = [await group.report() for group in groups.rollout]
        report = reports[0]
        self._progress.say(f"model: the engines generate with {self._recipe.model.dtype} weights (model.dtype)")
        invariant = "does not depend" if report.invariant else "depends"
        self._progress.say(
            f"rollout: {report.attention}; a sample {invariant} on what shares its batch ({report.reason})"
        )
        for note in dict.fromkeys(note for each in reports for note in each.notes):
            self._progress.say(f"rollout: {note}")
        renderer = renderer_of(self._recipe)
        for note in renderer.notes if renderer else ():
            self._progress.say(f"renderer: {note}")
        episodes = (self._recipe.episode, *self._recipe.episode.others.values())
        for note in dict.fromkeys(note for episode in episodes for note in create_kind(episode).notes()):
            self._progress.say(note)
        await self._say_layouts(groups)


ROLE = "trainer"
"""Key of recovery.restarts_per_hour for restarts of the whole run."""

LOSSES = (WorkerDiedError, PayloadLostError)
"""Errors after which a run can start again, in addition to some of RemoteError."""


def describe_loss(error: InterlaceError) -> str:
    """Returns one line on an error after which a run starts again."""
    if isinstance(error, RemoteError):
        return f"{first_line(error)} {error.remote_traceback.strip().splitlines()[-1]}."
    return first_line(error)


class RunRestarts:
    """Decides whether a run starts again, in the same command, from its newest checkpoint."""

    def __init__(self, config: RecoveryConfig, now_s: Callable[[], float] = time.monotonic) -> None:
        """now_s: clock of the budget."""
        per_hour = config.restarts_per_hour.get(ROLE)
        self._is_on, self._budget, self._now_s = per_hour != 0, RestartBudget(ROLE, per_hour), now_s
        self._most_in_a_row, self._in_a_row = config.restarts_in_a_row, 0
        self._furthest_step = -1

    def allow(self, error: InterlaceError, done_steps: int) -> bool:
        """Counts a loss after `done_steps` steps. Returns whether the run starts again.

        A loss is the death or the hang of a process, an operation that failed by a connection, a device or a disk, or
        the content of a sample.
        If a limit is reached, adds its sentence to the error.
        """
        if not self._is_on or not (isinstance(error, LOSSES) or is_infrastructure_error(error)):
            return False
        self._in_a_row = 0 if done_steps > self._furthest_step else self._in_a_row
        self._furthest_step = max(self._furthest_step, done_steps)
        self._in_a_row += 1
        reason = self._budget.spend(self._now_s())
        if self._in_a_row > self._most_in_a_row:
            reason = (
                f"the run was started again {self._most_in_a_row} times without a new step "
                "(recovery.restarts_in_a_row), so another start would end in the same way"
            )
        if reason:
            error.add_note(f"It was not started again: {reason}.")
            return False
        return True
