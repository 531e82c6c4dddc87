"""Calls of one rollout engine: they carry requests and cancellations, and return responses."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.core.progress import Progress
from interlace.core.types import FinishReason, Response, SampleKey
from interlace.rollouts.engine_job import EngineHost, Job
from interlace.rollouts.engine_jobs import EngineJobs
from interlace.rollouts.generation_meter import GenerationMeter
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.weight_swap import WeightSwap
from interlace.runtime.timeline import Span, TurnStart
from interlace.schedule.concurrency import ConcurrencyLimit, EngineUse

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver


class EngineCalls:
    """Runs the jobs of one engine by calls to its worker, at most as many as the concurrency limit admits.

    Consumes: queued jobs, cancellations and ends of samples, which the next call carries.
    Produces: responses and drafts for the host, and the record of each call in the timeline.
    """

    def __init__(
        self,
        group: RolloutGroup,
        jobs: EngineJobs,
        meter: GenerationMeter,
        weights: WeightSwap,
        limit: ConcurrencyLimit,
        host: EngineHost,
    ) -> None:
        self._group, self._jobs, self._meter, self._weights, self._host = group, jobs, meter, weights, host
        self.limit = limit
        """Limit on the sequences of the engine."""
        self.kv_use = 0.0
        """Share of the KV cache that the last call used."""
        self.counts: Counter[str] = Counter()
        """Numbers of sequences, since the start, that new weights interrupted or that were migrated."""
        self._aborts: list[str] = []
        self._ended: list[SampleKey] = []

    @property
    def room(self) -> float:
        """Number of further sequences that the engine has room for."""
        return self.limit.value - len(self._jobs.running) - self._jobs.num_queued

    @property
    def has_work(self) -> bool:
        """True if the engine must be called: a job runs, or a cancelled job must leave the engine."""
        return bool(self._jobs.running or self._aborts)

    def cancel(self, request_id: str) -> bool:
        """Ends a job without a delivery. Returns whether it ran, so that the next call must remove it."""
        if queued := self._jobs.remove_queued(request_id):
            self._meter.drop(len(queued.request.generated_ids))
        if not self._jobs.end_running(request_id):
            return False
        self._aborts.append(request_id)
        return True

    def release(self, owner: SampleKey) -> None:
        """Releases the KV cache of a sample, with the next call: it has no further turn on this engine."""
        self._ended.append(owner)

    def admit(self) -> list[Job]:
        """Moves the queued jobs that may begin now to the running ones, and returns them."""
        admitted: list[Job] = []
        while self._weights.has_ready_job() and len(self._jobs.running) < self.limit.value:
            admitted.append(self._jobs.start_first())
        return admitted

    async def serve(self, jobs: Sequence[Job]) -> tuple[Progress, Span]:
        """Submits jobs that admit() returned, and decodes until one finishes or the call is interrupted.

        Returns the progress and the span of the call.
        """
        aborts, self._aborts = tuple(self._aborts), []
        ended, self._ended = tuple(self._ended), []
        for job in jobs:
            begun = job.request
            self._meter.submit(begun.id, begun.num_prompt_tokens, begun.num_tokens, job.num_history)
            self._meter.begin_turn(TurnStart(*begun.owner, begun.turn, job.asked_s))
        requests = tuple([job.request for job in jobs])
        return await self._group.inline(RolloutGroup.serve, requests, aborts, ended)

    def record(self, progress: Progress, span: Span) -> None:
        """Delivers the results of a call and records its work."""
        self.kv_use = progress.kv_use
        served = self._meter.end(span, progress, self._jobs.num_queued)
        if self._host.curve:
            self._host.curve.observe(served)
        for draft in progress.drafts:
            running = self._jobs.running.get(draft.request_id)
            if running and running.on_draft:  # called separately, so that its errors do not stop the engine
                asyncio.get_running_loop().call_soon(running.on_draft, draft)
        for response in progress.responses:
            if job := self._end_job(response):
                self._host.on_response(job, response)
        if self.limit.adapts:
            self.limit.observe(self._measure_use(progress))

    async def abort_all(self, reason: str, onto: "list[EngineDriver] | None" = None) -> None:
        """Removes all running sequences and dispatches them again (to `onto`). reason: name of the count."""
        call = self._group.abort()
        partials = await call
        self._meter.take_out(call.spans[0], partials)
        jobs = []
        for response in partials:
            job = self._end_job(response)
            if job is None:
                continue
            if response.finish_reason != FinishReason.ABORTED:  # it finished before the abort reached the server
                self._host.on_response(job, response)
                continue
            jobs.append(replace(job, request=response.resumed))
        self._host.on_partials(jobs, onto)
        self.counts[reason] += len(jobs)

    def forget(self) -> list[Job]:
        """Records that the engine's process ended. Returns the running jobs, which begin again from their requests."""
        jobs = [*self._jobs.running.values()]
        for job in jobs:
            self._jobs.end_running(job.request.id)
        self._aborts.clear()
        self._ended.clear()
        self._meter.forget()
        return jobs

    def _end_job(self, response: Response) -> Job | None:
        """Ends the job of a response. Returns None if it was cancelled before the response arrived."""
        job = self._jobs.end_running(response.request.id)
        if job is None:
            self._meter.drop(len(response.token_ids))
        return job

    def _measure_use(self, progress: Progress) -> EngineUse:
        return EngineUse(
            num_here=progress.num_running + progress.num_waiting,
            num_waiting=progress.num_waiting,
            num_finished=len(progress.responses),
            kv_use=progress.kv_use,
            num_preemptions=progress.num_preemptions,
            is_binding=self._weights.has_ready_job(),
        )
