"""Drives one rollout engine: submits requests, returns responses, swaps weights and yields devices."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from interlace.core.errors import WorkerDiedError
from interlace.core.progress import Progress
from interlace.core.state_parts import WEIGHTS
from interlace.core.types import FinishReason, Metrics, Response, SampleKey
from interlace.rollouts.engine_job import EngineHost, Job
from interlace.rollouts.engine_jobs import EngineJobs
from interlace.rollouts.generation_meter import GenerationMeter
from interlace.rollouts.role_groups import RolloutGroup
from interlace.runtime.clock import Clock
from interlace.runtime.timeline import Span, Timeline, TurnStart
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.concurrency import EngineUse, create_limit
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import UpdateMode, WeightRef

ROUNDING_S = 1e-6
"""Rounding tolerance of clocks, in seconds."""


class EngineDriver:
    """Loop of one rollout engine (`run`).

    Consumes: jobs (`submit`), new weights (`update_weights`), cancellations.
    Produces: responses and drafts for the host, which is the engine pool.
    Waits for: work, then devices. It holds the devices until no work is left or another role requests them.
    Released by: a job, new weights, the device lock.
    """

    def __init__(
        self,
        group: RolloutGroup,
        waits: WaitRegistry,
        clock: Clock,
        timeline: Timeline,
        schedule: Schedule,
        host: EngineHost,
    ) -> None:
        self.group = group
        self.version = -1
        self.jobs = EngineJobs()
        self.load = self.jobs.load
        self.kv_use = 0.0
        """Share of the KV cache that the last call used."""
        self.metrics: Metrics = {}
        """Metrics of the engine between its last two swaps of weights."""
        self._clock = clock
        self._meter = GenerationMeter(group, timeline)
        self._on_update, self._limit = schedule.on_update, create_limit(schedule.concurrency)
        self._min_hold = schedule.min_hold
        self._host = host
        self._wake = Signal(waits)
        self._aborts: list[str] = []
        self._ended: list[SampleKey] = []
        self.counts: Counter[str] = Counter()
        """Numbers of sequences, since the start, that new weights interrupted or that were migrated."""
        self._pending: WeightRef | None = None
        self._held_since = 0.0
        self._serving = self._yield_asked = self._is_swapping = False
        self.is_away = False
        """True while the engine is outside the pool: it takes no jobs, and its weights are not updated."""
        self.is_lost = False
        """True from the loss of the engine until it joins again, which the membership decides."""
        self._onto: list[EngineDriver] | None = None
        """Engines to which the running jobs will move; None if they stay."""
        self._num_awaited = 0
        """Number of engines whose running jobs will move here and continue under this engine's current weights."""
        self._drops_cache = schedule.kv_on_switch == "recompute"
        group.driven_by(self)

    def follow(self, schedule: Schedule) -> None:
        """Takes the treatment of updates and the limit of sequences from another schedule."""
        self._on_update, self._limit = schedule.on_update, create_limit(schedule.concurrency)
        self._poke()

    @property
    def starts_new(self) -> bool:
        """False while an update is pending: a new sequence would have an older version than its deadline assumes."""
        return self._pending is None

    @property
    def pending_version(self) -> int | None:
        """Version of the weights that the engine will swap to, or None."""
        return self._pending.version if self._pending else None

    def submit(self, job: Job) -> None:
        """Queues a job."""
        self.jobs.add(job)
        self._poke()

    def cancel(self, request_id: str) -> None:
        """Ends a job without a delivery. Does nothing if the engine has no such job."""
        if queued := self.jobs.remove_queued(request_id):
            self._meter.drop(len(queued.request.generated_ids))
        if self.jobs.end_running(request_id):
            self._aborts.append(request_id)
            self._poke()

    def release(self, owner: SampleKey) -> None:
        """Releases the KV cache of a sample, with the next call: it has no further turn on this engine."""
        self._ended.append(owner)

    def update_weights(self, ref: WeightRef) -> None:
        """Swaps to new weights as soon as `on_update` allows. A newer version replaces a pending one."""
        self._pending = ref
        self._poke()

    @property
    def room(self) -> float:
        """Number of further sequences that the engine has room for."""
        return self._limit.value - len(self.jobs.running) - self.jobs.num_queued

    @property
    def is_evacuating(self) -> bool:
        """Returns whether the running jobs will move to other engines."""
        return self._onto is not None

    def evacuate(self, onto: "list[EngineDriver]") -> None:
        """Moves all running jobs to the given engines as partials. These engines do not swap weights until then."""
        if not self.jobs.running or self._onto is not None:
            return
        self._onto = onto
        for driver in onto:
            driver._num_awaited += 1
        self._poke()

    async def _move(self, onto: "list[EngineDriver]") -> None:
        self.counts["migrated"] += await self._abort_all(onto)
        self._end_move(onto)

    def _end_move(self, onto: "list[EngineDriver]") -> None:
        self._onto = None
        for driver in onto:
            driver._num_awaited -= 1
            driver._poke()

    def leave(self, others: "list[EngineDriver]", *, drains: bool = False) -> None:
        """Moves all jobs to the other engines and takes no more until join(). drains: running jobs finish here."""
        self.is_away = True
        self._host.on_partials(self.jobs.take_queue(), others)
        self._host.standing.fire()
        if not drains:
            self.evacuate(others)

    def lose_weights(self) -> None:
        """Marks the engine as lost, and its weights as unknown until its next swap."""
        self.version, self.is_lost = -1, True

    def join(self) -> None:
        """Takes jobs again, after the newest weights have arrived."""
        self.is_away = self.is_lost = False
        self._poke()

    async def run(self) -> None:
        """Runs the engine until the task is cancelled."""
        while True:
            while not self._has_work():
                await self._wake.wait(who=self.group.name, what="requests or weights")
            try:
                async with self.group.hold("generate"):
                    self._yield_asked, self._held_since = False, self._clock.now()
                    await self._serve()
            except WorkerDiedError as error:
                if not self.group.can_revive:
                    raise
                self._lose_process(str(error))

    def _lose_process(self, reason: str) -> None:
        """Returns the running jobs to the pool, to begin again from their requests, and reports the loss."""
        jobs = [*self.jobs.running.values()]
        for job in jobs:
            self.jobs.end_running(job.request.id)
        self._aborts.clear()
        self._ended.clear()
        self._serving = False
        self._meter.forget()
        if self._onto is not None:
            self._end_move(self._onto)
        if self._is_swapping:
            self._is_swapping = False
            self._host.on_swapped()
        self._host.on_lost(self, reason)
        self._host.on_partials(jobs)

    def _has_work(self) -> bool:
        if self.is_away:
            return bool(self.jobs.running or self._aborts or self.is_evacuating)
        if self._pending and self._num_awaited:  # otherwise it would hold its devices while it waits for these jobs
            return bool(self.jobs.running or self._aborts or self.is_evacuating or self._is_more_ready())
        return bool(self._pending or self.is_evacuating or self.jobs.num_queued or self.jobs.running or self._aborts)

    def _finds_work(self) -> bool:
        """Takes over requests queued for other engines, unless the engine must drain, leave or yield its devices."""
        if self._host.num_unswapped and self.starts_new and not self.is_away and not self._yield_asked:
            self._host.fill(self)
        return self._has_work()

    async def _serve(self) -> None:
        while self._has_work() or self._finds_work():
            if self._onto is not None:
                await self._move(self._onto)
            if self._pending and not self.is_away:
                await self._swap_if_due()
            self._finds_work()
            admitted = self._admit()
            if not self.jobs.running and not self._aborts:
                continue
            aborts, self._aborts = tuple(self._aborts), []
            ended, self._ended = tuple(self._ended), []
            self._serving = True
            for job in admitted:
                begun = job.request
                self._meter.submit(begun.id, begun.num_prompt_tokens, begun.num_tokens, job.num_history)
                self._meter.begin_turn(TurnStart(*begun.owner, begun.turn, job.asked_s))
            requests = tuple([job.request for job in admitted])
            progress, span = await self.group.inline(RolloutGroup.serve, requests, aborts, ended)
            self._serving = False
            self._book(progress, span)
            if progress.lost:
                self._host.on_lost(self, progress.lost)
            elif self._yield_asked and self._clock.now() - self._held_since >= self._min_hold - ROUNDING_S:
                return

    def _book(self, progress: Progress, span: Span) -> None:
        """Processes the results of a call."""
        self.kv_use = progress.kv_use
        served = self._meter.end(span, progress, self.jobs.num_queued)
        if self._host.curve:
            self._host.curve.observe(served)
        for draft in progress.drafts:
            if listener := self._host.listeners.get(draft.request_id):
                asyncio.get_running_loop().call_soon(listener, draft)  # separate, so its errors do not stop the engine
        for response in progress.responses:
            self._deliver(response)
        if self._limit.adapts:
            self._limit.observe(self._use(progress))

    def _admit(self) -> list[Job]:
        admitted: list[Job] = []
        while not self.is_away and (job := self.jobs.first()) and len(self.jobs.running) < self._limit.value:
            if not self._may_begin(job):
                break
            admitted.append(self.jobs.start_first())
        return admitted

    def _use(self, progress: Progress) -> EngineUse:
        return EngineUse(
            num_here=progress.num_running + progress.num_waiting,
            num_waiting=progress.num_waiting,
            num_finished=len(progress.responses),
            kv_use=progress.kv_use,
            num_preemptions=progress.num_preemptions,
            is_binding=self._is_more_ready(),
        )

    def _is_more_ready(self) -> bool:
        following = self.jobs.first()
        return following is not None and self._may_begin(following)

    def _may_begin(self, job: Job) -> bool:
        """Returns whether a job may begin. While an update is pending, only jobs begun under these or older weights."""
        versions = job.request.generated_versions
        return self.starts_new or (len(versions) > 0 and versions[-1] <= self.version)

    def _deliver(self, response: Response) -> None:
        job = self.jobs.end_running(response.completion.request.id)
        if job is None:  # cancelled before the response arrived
            self._meter.drop(len(response.completion.token_ids))
            return
        self._host.on_response(job, response)

    async def _swap_if_due(self) -> None:
        # A loop, because another version may be published during a swap.
        while self._pending and not (self._on_update == "drain" and not self._pending.adapters and self._must_drain()):
            ref, self._pending, self._is_swapping = self._pending, None, True
            if self._on_update == "abort_resume" and self.jobs.running:
                self.counts["interrupted"] += await self._abort_all()
            await self._swap(ref)

    async def _swap(self, ref: WeightRef) -> None:
        self.group.version = ref.version
        # Under drain and abort_resume no sequence runs now, and the caches kept for later turns are of older weights.
        # An engine can serve several adapters, so under drain each sequence finishes with its adapter without a wait.
        mode: UpdateMode = "keep" if self._on_update == "keep" else "recompute"
        if self._on_update == "drain" and ref.adapters:
            mode = "own"
        await self.group.with_cause("publication").update_weights(ref, mode)
        if self._on_update == "recompute":
            self._meter.recompute()
        self.version = ref.version
        self.metrics = {**await self.group.engine_metrics(), **self._limit.metrics()}
        self._is_swapping = False
        self._host.on_swapped()
        if self.metrics.pop("is_lost", 0.0):
            self._host.on_lost(self, await self.group.health())

    def _must_drain(self) -> bool:
        return bool(self.jobs.running) or self._num_awaited > 0 or self._is_more_ready()

    async def _abort_all(self, onto: "list[EngineDriver] | None" = None) -> int:
        """Removes all running sequences and dispatches them again (to `onto`). Returns their number."""
        call = self.group.abort()
        partials = await call
        self._meter.take_out(call.spans[0], partials)
        jobs = []
        for response in partials:
            done = response.completion
            job = self.jobs.end_running(done.request.id)
            if job is None:
                self._meter.drop(len(done.token_ids))
                continue
            if done.finish_reason != FinishReason.ABORTED:  # it finished before the abort reached the server
                self._host.on_response(job, response)
                continue
            jobs.append(replace(job, request=done.resumed))
        self._host.on_partials(jobs, onto)
        return len(jobs)

    @property
    def unload_arguments(self) -> tuple[str, ...]:
        """Returns the arguments for the engine's offload()."""
        return ("recompute",) if self._drops_cache else ()

    def unloaded(self, parts: Sequence[str]) -> None:
        """Records that parts of the engine's state were offloaded from the devices."""
        if self._drops_cache and tuple(parts) != (WEIGHTS,):
            self._meter.recompute()

    def ask_to_yield(self) -> None:
        """Yields the devices after `min_hold`."""
        self._yield_asked = True
        left = self._held_since + self._min_hold - self._clock.now()
        if left > ROUNDING_S:
            asyncio.get_running_loop().call_later(left, self._poke)
        else:
            self._poke()

    def _poke(self) -> None:
        self._wake.fire()
        if self._serving:
            self.group.notify(RolloutGroup.interrupt)
