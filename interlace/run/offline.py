"""A run that trains on given rows: SFT, DPO, reward models."""

import asyncio
from collections.abc import Mapping, Sequence

from interlace.core.host_memory import frozen_heap
from interlace.core.types import Metrics, Prompt, Sample
from interlace.data.mixture import create_sampler
from interlace.data.stream import PromptStream
from interlace.flows.offline import offline_training
from interlace.flows.offline_run import OfflineRows, OfflineRun
from interlace.observe.jsonl import write_step
from interlace.observe.loggers import MetricsLoggers
from interlace.run.boundary import Boundary, StateLater
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.offline_encoder import create_encoder, encode_row, take_checked_rows
from interlace.run.recipe.offline_rows import RowEncoder
from interlace.run.recipe.reference_lengths import shortest_context
from interlace.run.saving import Saver
from interlace.run.session import RunProcess
from interlace.run.state import RunState
from interlace.run.step_trace import StepTrace
from interlace.runtime.cluster import Cluster
from interlace.runtime.waits import WaitRegistry
from interlace.stages.factory import LoopSizes, StageFactory

PART = 256
"""Rows that are encoded at a time on a thread."""


async def encode_on_thread(
    encoder: RowEncoder, prompts: Sequence[Prompt], waits: WaitRegistry, checked: Mapping[str, Sample]
) -> list[Sample]:
    """Encodes rows in parts on a thread. The event loop continues meanwhile, and a stop waits for one part at most.

    checked: samples of rows that the check before the run has encoded.
    """

    def encode_part(start: int) -> list[Sample]:
        return [encode_row(encoder, prompt, checked) for prompt in prompts[start : start + PART]]

    samples: list[Sample] = []
    for start in range(0, len(prompts), PART):
        with waits.operation(who="rows", what="their encoding"):
            samples += await asyncio.to_thread(encode_part, start)
    return samples


class OfflineSession(RunProcess):
    """One process of a run that trains on given rows."""

    async def _work(self, cluster: Cluster, logger: MetricsLoggers, trace: StepTrace) -> None:
        job, recipe, prompts = self._job, self._recipe, self._prompts
        sampler = create_sampler(recipe.task, prompts.train, recipe.seed)
        stream = PromptStream(prompts.train, recipe.seed, sampler, generated=recipe.task.generated_sources)
        if job.start.state:
            stream.restore(job.start.state.stream)
        encoder, checked = create_encoder(recipe), take_checked_rows(recipe)
        rows = await encode_on_thread(encoder, prompts.train, cluster.waits, checked)
        encoded = dict(zip([prompt.uid for prompt in prompts.train], rows, strict=True))
        heldout_prompts = prompts.first_of_each_set(recipe.evaluation.num_prompts)
        heldout = await encode_on_thread(encoder, heldout_prompts, cluster.waits, checked)
        del checked
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
        trained = (encoded[prompt.uid] for prompt in stream)
        stages = StageFactory(cluster, recipe.schedule.resolved, sizes)
        offline_rows = OfflineRows(train=trained, heldout=heldout, context=shortest_context(recipe))
        run = OfflineRun(cluster, stages, groups, algorithm_of(recipe), offline_rows)
        saver = Saver(
            cluster, self._checkpoints, groups, self._folder, every=recipe.checkpoint_every, memory=job.memory,
            settings=self._settings,
        )  # fmt: skip
        boundary = self._boundary = OfflineBoundary(
            job, run, saver, stream, logger=logger, trace=trace, quiet=self._quiet
        )
        run.start(boundary)
        await boundary.begin()
        if not boundary.has_ended:
            with frozen_heap():
                await offline_training(run)
        await boundary.finish()


class OfflineBoundary(Boundary):
    """Observes the offline flow: each step is logged, and may be checkpointed and evaluated."""

    _run: OfflineRun
    _evaluated_at: int | None = None
    """Step of the last evaluation."""

    async def begin(self) -> None:
        """Evaluates the model that the run starts with."""
        if self._job.start.checkpoint is None and (found := await self._evaluate("evaluation before")):
            self._log_first(found)
        await self._trace.at(self.done_steps + 1)

    async def on_offline_step(self, step: int, metrics: Metrics) -> bool:
        """Logs the step; evaluates and saves if it is due. Returns False after a stop was requested."""
        self.done_steps = step
        if self._recipe.eval_every and step % self._recipe.eval_every == 0:
            metrics = metrics | await self._evaluate(f"evaluation after step {step}")
        return await self._end_step(step, metrics, self._state_later(), self._run.num_updates)

    async def finish(self) -> None:
        """Ends the run after its flow: saves, and evaluates the trained model."""
        self.ledger = self._run.ledger()
        await self._save_last(self._state_later())
        if self._evaluated_at != self.done_steps and (found := await self._evaluate("evaluation after")):
            self._log_last(found)

    def _show_step(self, step: int, metrics: Metrics) -> None:
        self._progress.step(step, metrics)

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
        stream = self._stream.state_later(())
        done_steps, num_rows = self.done_steps, self._run.num_rows
        return lambda: RunState(done_steps=done_steps, num_groups=num_rows, stream=stream(), before=None)
