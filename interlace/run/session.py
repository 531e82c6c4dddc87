"""Base of the processes of a run: their opening, their end, and the start of their workers."""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.core.errors import (
    InterlaceError,
    RemoteError,
    RestartBudgetError,
    StoppedError,
    WorkerDiedError,
    WorkerHungError,
)
from interlace.core.types import JSON, TerminalEvent
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kinds.address import AddressKind
from interlace.engines.rollout.kinds.base import ServedKind
from interlace.engines.rollout.services.adoption import end_unused_servers, move_servers
from interlace.engines.train.export import ADAPTER_FOLDER
from interlace.flows.run import RoleGroups, shares_base
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.goodput import Ledger
from interlace.observe.loggers import MetricsLoggers, open_loggers
from interlace.observe.loggers.base import RunInfo
from interlace.observe.quiet import LOOK_EVERY_S, QuietWatch
from interlace.observe.run_folder import set_timeline_aside
from interlace.observe.run_identity import RunIdentity
from interlace.observe.stop import PATIENCE_S
from interlace.run.boundary import Boundary, TrainJob
from interlace.run.clusters.base import back_end
from interlace.run.engine_control import read_members
from interlace.run.evaluation import Evaluation
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import recipe_prompts
from interlace.run.saving import CRITIC_FOLDER
from interlace.run.step_trace import StepTrace
from interlace.run.warmup import make_warmed_model
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
    """The newest checkpoint."""
    ledger: Ledger = Ledger()
    """Device-seconds of this process, including its start and excluding the final evaluation."""
    was_interrupted: bool = False
    """True if Ctrl-C or SIGTERM ended the run before its last step. False if a callback or `best.patience` did."""

    @property
    def was_stopped(self) -> bool:
        """Returns whether the run ended before its last step, at a step boundary, with a checkpoint."""
        return self.done_steps < self.num_steps


class RunProcess(ABC):
    """One process of a run: cluster, loggers and workers, and the end of the process when a stop is requested."""

    def __init__(
        self, job: TrainJob, checkpoints: Checkpoints, identity: RunIdentity, settings: Mapping[str, JSON]
    ) -> None:
        """settings: the recipe's settings, with secrets masked."""
        self._job, self._checkpoints, self._identity, self._settings = job, checkpoints, identity, settings
        self._recipe, self._folder, self._progress, self._stop = job.recipe, job.folder, job.progress, job.stop
        self._began_s = time.monotonic()
        self._prompts = recipe_prompts(job.recipe)
        self._quiet = QuietWatch(job.progress)
        self._boundary: Boundary | None = None
        """Set when the run's roles are joined."""

    async def train(self) -> TrainReport:
        """Trains from the start or a checkpoint to the end."""
        recipe, folder, start = self._recipe, self._folder, self._job.start
        cluster = back_end(recipe.cluster).open_cluster(recipe.cluster, recipe.schedule.resolved)
        cluster.notes.follow(self._progress.say)
        self._job.on_cluster(cluster)
        info = RunInfo(
            name=recipe.logging.name or folder.name,
            project=recipe.logging.project,
            folder=folder.path,
            run_id=self._identity.run,
            config=self._settings,
            resumed_at=None if start.is_first else start.done_steps,
        )
        trace = StepTrace(cluster, folder.traces, self._progress, recipe.logging.trace_steps)
        done_steps = None
        kept = self._checkpoints, self._job.memory
        for each in kept:
            each.keep_start(start.done_steps if start.checkpoint else None)
        try:
            with (
                open_loggers(info, recipe.logging.loggers, say=self._progress.say) as logger,
                cluster.timeline.record_with(self._make_recorder(cluster)),
            ):
                done_steps = await self._run_work(cluster, self._work(cluster, logger, trace))
        finally:
            await trace.close()
            await cluster.shutdown()
            if self._boundary:  # before, this process does not have the best checkpoint's step, which must stay
                for each in kept:
                    each.keep_start(None)
        boundary = self._boundary
        return TrainReport(
            done_steps=self.done_steps if done_steps is None else done_steps,
            num_steps=recipe.steps,
            before=boundary.before if boundary else start.before,
            after=boundary.after if boundary else None,
            checkpoint=self._checkpoints.latest(),
            ledger=self.ledger,
        )

    async def _run_work(self, cluster: Cluster, work: Coroutine[Any, Any, None]) -> int | None:
        """Runs the flow to its end. Returns the saved step if it was stopped before, else None.

        If a role's budget of restarts is exhausted, or a process died that is not a trainer's, saves the last boundary
        and raises.
        """
        try:
            await self._until_stopped(cluster, work)
        except StoppedError:
            return await self._save_boundary()
        except WorkerHungError:
            raise  # a save would wait for the process, too
        except (RestartBudgetError, WorkerDiedError):
            await self._save_after_loss(cluster)
            raise
        return None

    async def _save_after_loss(self, cluster: Cluster) -> None:
        """Saves the last boundary, unless a process that trains died with its weights."""
        trainers = [process for process in cluster.processes if process.name.startswith(("actor", "critic"))]
        if self._boundary and not any([await process.death() for process in trainers]):
            with contextlib.suppress(RemoteError, WorkerDiedError):  # the error of the loss is the cause
                await self._boundary.stop()

    @property
    def ledger(self) -> Ledger:
        """Returns the device-seconds of this process, as far as they were measured."""
        return self._boundary.ledger if self._boundary else Ledger()

    @property
    def done_steps(self) -> int:
        """Returns the number of steps done, also by earlier processes."""
        return self._boundary.done_steps if self._boundary else self._job.start.done_steps

    @property
    def end_step(self) -> int | None:
        """Returns the step after which the run ends by a callback or `best.patience`, if that is known."""
        return self._boundary.end_step if self._boundary else self._job.end_step

    async def _until_stopped(self, cluster: Cluster, work: Coroutine[Any, Any, None]) -> None:
        """Runs the flow. Raises StoppedError if a stop was requested and the step did not end in time."""
        loop_limit_s = lambda: PATIENCE_S if self._stop.is_overdue else cluster.watchdog.hang_after_s  # noqa: E731
        cluster.spawn(self._stop_in_time(), name="stop")
        scoring = lambda: self._boundary.scoring if self._boundary else ""  # noqa: E731
        cluster.spawn(self._quiet.run(cluster.waits, scoring), name="quiet")
        try:
            await cluster.run(work, loop_limit_s=loop_limit_s)
        except InterlaceError as error:
            ended = self._boundary.ended if self._boundary else ()
            if self._boundary:
                self._boundary.keep_transcripts(ended)
                self._boundary.measure_ledger()
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
        """Returns the last saved step, after saving the last step's end if possible.

        Raises StoppedError if nothing was saved.
        """
        if self._boundary:
            await self._boundary.stop()
        saved = max(self._checkpoints.steps(), default=0)
        if not saved:
            raise StoppedError("stopped before there was anything to save.")
        if saved < self.done_steps:
            self._progress.say(
                f"step {self.done_steps + 1} had changed the weights: a resumed run repeats it from {saved}"
            )
        return saved

    def _make_recorder(self, cluster: Cluster) -> Recorder:
        if not self._recipe.logging.timeline or self.done_steps >= self._recipe.steps:
            return NoRecorder()  # without a remaining step, the existing timeline is kept
        set_timeline_aside(self._folder)
        return TraceFile(self._folder.timeline, cluster.devices)

    @abstractmethod
    async def _work(self, cluster: Cluster, logger: MetricsLoggers, trace: StepTrace) -> None:
        """Trains, from the start of this process to the last step or a stop."""

    async def _launch(self, cluster: Cluster, recipe: Recipe, longest: int) -> tuple[RoleGroups, ModelSources]:
        """Starts the workers with the weights and optimizers of the start. Returns them and their sources.

        longest: tokens of the longest prompt, or of the longest whole row of a run that trains on rows.
        """
        prompts, newest = self._prompts, self._job.start.checkpoint
        abort = self._stop.abort_if_requested  # an unfinished warm-up is discarded
        began_s = time.monotonic()
        initial = await make_warmed_model(cluster, recipe, prompts, self._progress, on_step=abort, run=self._folder)
        self._began_s += time.monotonic() - began_s  # a start from a checkpoint does not repeat the warm-up
        policy = initial.stored_in(newest) if newest else initial
        places = [" ".join(cluster.locations[each.index] for each in devices) for devices in cluster.place("rollout")]
        engines, num_places = None, len(places)
        kind = create_kind(recipe.rollout)
        if not isinstance(kind, AddressKind):
            engines = read_members(self._folder.engines, num_places)
        if engines is not None:
            self._progress.say(
                f"rollout: engines {list(engines)} of {num_places} start; the others were removed by command"
            )
        sources = ModelSources(
            recipe=recipe, policy=policy, initial=initial, longest_prompt=longest,
            critic=newest / CRITIC_FOLDER if newest else None,
            adapter=newest / ADAPTER_FOLDER if newest and recipe.actor.lora else None,
            logs=self._folder.engines, engines=engines, places=places,
        )  # fmt: skip
        served = range(num_places) if engines is None else engines
        kept = {number: places[number] for number in served} if isinstance(kind, ServedKind) else {}
        for sentence in (*move_servers(self._folder.engines, kept), *end_unused_servers(self._folder.engines, kept)):
            self._progress.say(sentence)
        groups = await launch_roles(cluster, sources)
        if newest:
            await groups.actor.load_optimizer(newest)
            if groups.critic:
                await groups.critic.load_optimizer(newest / CRITIC_FOLDER)
        return groups, sources

    async def _say_layouts(self, groups: RoleGroups) -> None:
        """Shows how each model that computes on given tokens lays them out."""
        reference = None if shares_base(groups) or not groups.reference else groups.reference[0]
        for name, group in (("actor", groups.actor), ("critic", groups.critic), ("reference", reference)):
            if group:
                self._progress.say(f"{name}: micro-batches are {await group.attention()}")
