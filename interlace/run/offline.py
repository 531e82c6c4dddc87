"""A run that trains on given rows: SFT, DPO, reward models."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from interlace.core.types import Metrics
from interlace.data.load_sampler import create_sampler
from interlace.data.stream import PromptStream
from interlace.flows.offline import offline_training
from interlace.flows.offline_run import OfflineRows, OfflineRun
from interlace.flows.steps import Ended
from interlace.observe.goodput import Ledger
from interlace.observe.jsonl import write_step
from interlace.observe.loggers import MetricsLoggers
from interlace.observe.quiet import QuietWatch
from interlace.run.best import BestKeeper
from interlace.run.evaluation import Evaluation
from interlace.run.failed_updates import FailedUpdates
from interlace.run.heap import frozen_heap
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.offline_encoder import encode_rows
from interlace.run.saving import Saver
from interlace.run.session import RunProcess
from interlace.run.state import RunState
from interlace.run.step_boundary import TrainJob
from interlace.run.step_trace import StepTrace
from interlace.runtime.cluster import Cluster
from interlace.stages.factory import LoopSizes, StageFactory

StateLater: TypeAlias = Callable[[], RunState]


class OfflineSession(RunProcess):
    """One process of a run that trains on given rows."""

    async def _work(self, cluster: Cluster, logger: MetricsLoggers, trace: StepTrace) -> None:
        job, recipe, prompts = self._job, self._recipe, self._prompts
        sampler = create_sampler(recipe.task, prompts.train, recipe.seed)
        stream = PromptStream(prompts.train, recipe.seed, sampler, generated=recipe.task.generated_sources)
        if job.start.state:
            stream.restore(job.start.state.stream)
        encoded = dict(zip([prompt.uid for prompt in prompts.train], encode_rows(recipe, prompts.train), strict=True))
        heldout = encode_rows(recipe, prompts.first_of_each_set(recipe.evaluation.num_prompts))
        longest = max(row.num_total_tokens for row in [*encoded.values(), *heldout])
        groups, _ = await self._launch(cluster, recipe, longest)
        await self._say_layouts(groups)
        sizes = LoopSizes(
            prompts_per_step=recipe.prompts_per_step,
            samples_per_prompt=1,
            num_steps=recipe.steps,
            done_steps=job.start.done_steps,
            minibatches=recipe.minibatches,
        )
        rows = OfflineRows(train=(encoded[prompt.uid] for prompt in stream), heldout=heldout)
        stages = StageFactory(cluster, recipe.schedule.resolved, sizes)
        run = OfflineRun(cluster, stages, groups, algorithm_of(recipe), rows)
        saver = Saver(
            cluster, self._checkpoints, groups, self._folder, every=recipe.checkpoint_every, memory=job.memory,
            settings=self._settings,
        )  # fmt: skip
        boundary = self._boundary = OfflineBoundary(
            job, run, saver, stream, logger=logger, trace=trace, quiet=self._quiet
        )
        run.start(boundary)
        await boundary.begin()
        with frozen_heap():
            await offline_training(run)
        await boundary.finish()


class OfflineBoundary:
    """Observes the offline flow: each step is logged, and may be checkpointed and evaluated."""

    def __init__(
        self,
        job: TrainJob,
        run: OfflineRun,
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
        self._failed_updates = FailedUpdates(job.recipe.optimizer.max_failed_updates)
        self._best = BestKeeper(job.recipe.best, job.folder, saver.checkpoints, job.progress)
        self._state: StateLater | None = None
        """The state at the end of the last step of this process."""
        self._num_updates = 0
        """Updates that were begun until then."""
        self._evaluated_at: int | None = None
        """Step of the last evaluation."""
        self.done_steps = job.start.done_steps
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.ledger = Ledger()

    async def begin(self) -> None:
        """Evaluates the model that the run starts with."""
        if self._job.start.checkpoint is None and (found := await self._evaluate("evaluation before")):
            self._best.check_evaluation(found)
            self._logger.log_evaluation(self.done_steps, found)
        await self._trace.at(self.done_steps + 1)

    async def on_offline_step(self, step: int, metrics: Metrics) -> bool:
        """Logs the step; evaluates and saves if it is due. Returns False after a stop was requested."""
        recipe, job = self._recipe, self._job
        self.done_steps = step
        found = metrics
        if recipe.eval_every and step % recipe.eval_every == 0:
            found = found | await self._evaluate(f"evaluation after step {step}")
        measured = found

        async def save() -> None:
            self._logger.log(step, measured)
            await self._saver.save(self._state_later()())

        found = found | await job.callbacks.call_or_save(step, recipe.steps, found, self._stream, save=save)
        self._state, self._num_updates = self._state_later(), self._run.num_updates
        is_best = self._best.observe(step, found)
        place = self._saver.find_due(step, is_best=is_best)
        if place:
            found["timing_s/checkpoint"] = await self._saver.copy()
        self._logger.log(step, found)
        self._progress.step(step, found)
        self._quiet.heard(f"step {step + 1}")
        if is_best:
            self._best.mark(step)
        if place:
            self._saver.write(self._state(), place)
        if failing := self._failed_updates.failing(found):
            await self._saver.save(self._state())  # no update since the last good one changed anything
            self._failed_updates.refuse(failing, step)
        await self._trace.at(step + 1)
        return not (job.stop.requested or job.callbacks.want_stop or self._best.wants_stop)

    async def finish(self) -> None:
        """Ends the run after its flow: saves, and evaluates the trained model."""
        self.ledger = self._run.ledger()
        if self.done_steps:
            await self._saver.save(self._state_later()())
        self._failed_updates.refuse_a_run_without_updates()
        if self._evaluated_at != self.done_steps and (found := await self._evaluate("evaluation after")):
            self._logger.log_evaluation(self.done_steps, found)
            if self.done_steps and self._best.observe_final(self.done_steps, found):
                self._best.mark(self.done_steps)

    async def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, as long as a stop may last."""
        await self._saver.finish_in_time()

    async def stop(self) -> None:
        """Saves the end of the last step, unless the weights have changed since, as long as a stop may last."""
        if self._state and self._run.num_updates == self._num_updates:
            await self._saver.save_in_time(self._state())
        self.ledger = self._run.ledger()

    def keep_transcripts(self, ended: Sequence[Ended]) -> None:
        """Does nothing: given rows are in the data."""
        del ended

    @property
    def ended(self) -> Sequence[Ended]:
        """Returns no samples: the rows of a step all end as trained."""
        return ()

    @property
    def scoring(self) -> str:
        """Returns an empty text: nothing is scored."""
        return ""

    async def _evaluate(self, title: str) -> Metrics:
        self._progress.stage(title, 0, 1)
        self._quiet.heard(title)
        found = await self._run.evaluate()
        self._evaluated_at = self.done_steps
        told = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
        self._progress.stage(title, 1, 1, told or "no held-out rows")
        self._quiet.heard(f"step {self.done_steps + 1}")
        if found:
            write_step(self._folder.evaluations, self.done_steps, found)
        return found

    def _state_later(self) -> StateLater:
        """Returns a function that gives the state of now."""
        stream = self._stream.state_later(())
        done_steps, num_rows = self.done_steps, self._run.num_rows
        return lambda: RunState(done_steps=done_steps, num_groups=num_rows, stream=stream(), before=None)
