"""Calls of one rollout engine: they carry requests and cancellations, and return responses."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.progress import Progress
from interlace.core.types import FinishReason, Response, SampleKey
from interlace.rollouts.engine_jobs import EngineJobs, Job, ResponseReceiver
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.weight_swap import WeightSwap
from interlace.runtime.group import TypedGroup
from interlace.runtime.timeline import EngineCall, Span, Timeline, TurnEnd, TurnStart
from interlace.schedule.concurrency import ConcurrencyLimit, EngineUse, EpisodeLimit


class GenerationMeter:
    """Counts the tokens that enter and leave one engine. The goodput ledger reads the repeated part of the work."""

    def __init__(self, group: TypedGroup, timeline: Timeline) -> None:
        self._group, self._timeline = group, timeline
        self.num_cached_tokens = 0
        """Tokens of the sequences that were submitted and have not left."""
        self._repeated_tokens = self._prompt_tokens = 0
        self._histories: dict[str, int] = {}
        """For each running turn, the context tokens from earlier turns, which the engine reuses or recomputes."""
        self._begun: list[TurnStart] = []

    def submit(self, request_id: str, num_prompt: int, num_generated: int, num_history: int) -> None:
        """Records the tokens of a request of the next call: prompt, response so far, and context of earlier turns."""
        self._timeline.prompts_s[self._group.name] = self._timeline.clock.now()
        self.num_cached_tokens += num_prompt + num_generated
        if num_generated:
            self._repeated_tokens += num_prompt + num_generated
        else:
            self._prompt_tokens += num_prompt - num_history
            if num_history:
                self._histories[request_id] = num_history

    def begin_turn(self, turn: TurnStart) -> None:
        """Records a turn of the next call. Turns outside the flow, such as turns of an evaluation, are left out."""
        if _is_of_flow(turn):
            self._begun.append(turn)

    def recompute(self) -> None:
        self._repeated_tokens += self.num_cached_tokens

    def take_out(self, span: Span, responses: Sequence[Response]) -> list[TurnEnd]:
        """Records sequences that left the engine with a call. Returns the ended turns of the flow. span: see end()."""
        ended = []
        for done in responses:
            self.num_cached_tokens -= len(done.request.prompt_ids) + len(done.token_ids)
            # The engine reports reused tokens only now, so recomputed tokens count for this call.
            self._repeated_tokens += max(0, self._histories.pop(done.request.id, 0) - done.num_cached_tokens)
            turn = TurnEnd(*done.request.owner, done.request.turn, len(done.token_ids))
            if _is_of_flow(turn) and done.finish_reason != FinishReason.ABORTED:
                ended.append(turn)
        span.finished_groups = [turn.gid for turn in ended]
        return ended

    def forget(self) -> None:
        """Records that the engine's process ended with its running sequences, which begin again."""
        self.num_cached_tokens = self._repeated_tokens = self._prompt_tokens = 0
        self._histories.clear()
        self._begun.clear()

    def drop(self, num_tokens: int) -> None:
        self._timeline.drop_tokens(num_tokens)

    def end(self, span: Span, progress: Progress, num_queued: int) -> EngineCall:
        """Records the end of a call. Returns the work of the call.

        span: span of rank 0. num_queued: requests that were not submitted to the engine yet.
        """
        num_held_tokens = self.num_cached_tokens + progress.num_new_tokens / 2
        self.num_cached_tokens += progress.num_new_tokens
        ended = self.take_out(span, progress.responses)
        reasons = [response.finish_reason for response in progress.responses]
        num_finished = len(reasons) - reasons.count(FinishReason.ABORTED)
        served = EngineCall(
            span=span,
            devices=self._group.device_indices,
            batch=progress.num_running + num_finished,
            num_new_tokens=progress.num_new_tokens,
            num_prompt_tokens=self._prompt_tokens,
            num_repeated_tokens=self._repeated_tokens,
            num_running=progress.num_running,
            num_queued=num_queued + progress.num_waiting,
            num_waiting=progress.num_waiting,
            num_preemptions=progress.num_preemptions,
            kv_use=progress.kv_use,
            num_held_tokens=num_held_tokens,
            begun=tuple(self._begun),
            ended=tuple(ended),
        )
        self._begun.clear()
        self._repeated_tokens = self._prompt_tokens = 0
        self._timeline.serve(served)
        return served


class EngineCalls:
    """Runs the jobs of one engine by calls to its worker, at most as many as the concurrency limit admits.

    Consumes: queued jobs, cancellations and ends of samples, which the next call carries.
    Produces: responses and drafts for the dispatcher, and the record of each call in the timeline.
    """

    def __init__(
        self,
        group: RolloutGroup,
        jobs: EngineJobs,
        meter: GenerationMeter,
        weights: WeightSwap,
        limit: ConcurrencyLimit,
        receiver: ResponseReceiver,
    ) -> None:
        self._group, self._jobs, self._meter, self._weights = group, jobs, meter, weights
        self._receiver = receiver
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
        self.drop_context(owner)

    def order(self, job: Job) -> Job:
        """Returns a job that is about to be queued, before all others if the engine has the context of its sample."""
        return replace(job, order=-math.inf) if self._episodes and self._episodes.expect(job.request.owner) else job

    def drop_context(self, owner: SampleKey) -> None:
        """Records that a sample has no context here that it will return to."""
        if self._episodes:
            self._episodes.drop(owner)

    def drop_contexts(self) -> None:
        if self._episodes:
            self._episodes.clear()

    @property
    def _episodes(self) -> EpisodeLimit | None:
        return self.limit if isinstance(self.limit, EpisodeLimit) else None

    def admit(self) -> list[Job]:
        """Moves the queued jobs that may begin now to the running ones, and returns them."""
        admitted: list[Job] = []
        num_tokens = self._meter.num_cached_tokens
        while self._weights.has_ready_job() and len(self._jobs.running) < self.limit.value:
            if self._episodes and not self._begin_episode(num_tokens):
                break
            admitted.append(self._jobs.start_first())
            num_tokens += admitted[-1].num_tokens
        return admitted

    def _begin_episode(self, num_running: int) -> bool:
        """Returns whether the first queued job may begin, with its context. num_running: tokens of the sequences."""
        job, episodes = self._jobs.first(), self._episodes
        if job is None or episodes is None:
            return job is not None
        # An engine without a sequence admits any turn: an episode may wait for another one.
        if self._jobs.running and not episodes.admits(job.request.owner, job.num_tokens, num_running):
            return False
        episodes.drop(job.request.owner)
        return True

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
        self.kv_use = progress.kv_use
        num_tokens = self._meter.num_cached_tokens + progress.num_new_tokens
        served = self._meter.end(span, progress, self._jobs.num_queued)
        if self._receiver.curve:
            self._receiver.curve.observe(served)
        for draft in progress.drafts:
            running = self._jobs.running.get(draft.request_id)
            if running and running.on_draft:  # called separately, so that its errors do not stop the engine
                asyncio.get_running_loop().call_soon(running.on_draft, draft)
        for response in progress.responses:
            if job := self._end_job(response):
                if self._episodes and response.request.may_continue and not response.failure:
                    num_kept = response.request.num_prompt_tokens + len(response.token_ids)
                    self._episodes.keep(response.request.owner, num_kept)
                self._receiver.on_response(job, response)
        if self.limit.adapts:
            self.limit.observe(self._measure_use(progress, num_tokens))
        if self._episodes:
            self._ended += self._episodes.pause(self._meter.num_cached_tokens)

    async def abort_all(self, reason: str) -> list[Job]:
        """Removes all running sequences. Returns the jobs that continue them. reason: name of the count."""
        call = self._group.abort()
        partials = await call
        self._meter.take_out(call.spans[0], partials)
        jobs = []
        for response in partials:
            job = self._end_job(response)
            if job is None:
                continue
            if response.finish_reason != FinishReason.ABORTED:  # it finished before the abort reached the server
                self._receiver.on_response(job, response)
                continue
            jobs.append(replace(job, request=response.resumed))
        self.counts[reason] += len(jobs)
        return jobs

    def forget(self) -> list[Job]:
        """Records that the engine's process ended. Returns the running jobs, which begin again from their requests."""
        jobs = [*self._jobs.running.values()]
        for job in jobs:
            self._jobs.end_running(job.request.id)
        self._aborts.clear()
        self._ended.clear()
        self.drop_contexts()
        self._meter.forget()
        return jobs

    def _end_job(self, response: Response) -> Job | None:
        """Ends the job of a response. Returns None if it was cancelled before the response arrived."""
        job = self._jobs.end_running(response.request.id)
        if job is None:
            self._meter.drop(len(response.token_ids))
        return job

    def _measure_use(self, progress: Progress, num_tokens: int) -> EngineUse:
        """Returns the report of a call. num_tokens: of all its sequences."""
        return EngineUse(
            num_here=progress.num_running + progress.num_waiting,
            num_waiting=progress.num_waiting,
            num_finished=len(progress.responses),
            kv_use=progress.kv_use,
            num_preemptions=progress.num_preemptions,
            is_binding=self._weights.has_ready_job(),
            num_tokens=self._meter.num_cached_tokens,
            num_ended_tokens=num_tokens - self._meter.num_cached_tokens,
        )


def _is_of_flow(turn: TurnStart | TurnEnd) -> bool:
    """Returns whether a turn belongs to a sample of the flow, and not to an evaluation or a baseline."""
    return turn.gid >= 0 and turn.number >= 0
