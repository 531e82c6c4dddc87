"""The engine pool, which dispatches requests to all rollout engines and returns their responses."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Metrics, Request, Response, SampleKey
from interlace.rollouts.dispatcher import Dispatcher
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_jobs import Deliver, Job, OnDraft
from interlace.rollouts.membership import NO_CHANGES, Membership, MembershipRules
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.served_weights import ServedWeights
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import Timeline
from interlace.schedule.lengths import LengthPredictor, LengthRanker, MeanLength
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import WeightRef

FIRST = -math.inf
"""Order of requests from outside the flow: before new samples, because a step boundary waits for these requests."""

SHARES = {"kv_use": "", "draft_acceptance": "draft_tokens"}
"""Metrics of an engine that are shares -> the metric that counts the whole; empty if engines have equal parts."""


def settle(future: "asyncio.Future[Response]", response: Response) -> None:
    """Sets the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(response)


class TokenBudget:
    """Limits the tokens that a sample generates between two publications, over all its turns.

    Consumes: jobs before their dispatch (`limit_jobs`), and responses (`charge`).
    Produces: jobs with a smaller limit, and suspended jobs.
    Waits for: nothing. Suspended jobs stay here until `renew`.
    """

    def __init__(
        self, schedule: Schedule, timeline: Timeline, *, expected_tokens: int, on_suspended: Callable[[], None]
    ) -> None:
        """expected_tokens: tokens of a response, until one has ended. on_suspended: called after each suspension."""
        self._schedule, self._timeline, self._on_suspended = schedule, timeline, on_suspended
        self._mean_length = MeanLength(float(expected_tokens))
        self.suspended: dict[str, Job] = {}
        """Suspended jobs by request."""
        self.num_suspensions = 0
        """Number of suspensions since the start."""
        self._spent: dict[SampleKey, int] = {}
        """Tokens of a sample's requests since the last publication. Empty without a budget."""

    @property
    def mean_tokens(self) -> float:
        return self._mean_length.tokens

    @property
    def tokens(self) -> int | None:
        """Tokens that a sample may generate between two publications. None without a limit."""
        return self._schedule.budget_tokens(self._mean_length.tokens)

    def limit_request(self, request: Request, max_new_tokens: int) -> Request:
        """Lowers the limit of a request to the whole budget. max_new_tokens: limit without the budget."""
        if (tokens := self.tokens) is None:
            return request
        return _limit_request(request, min(max_new_tokens, len(request.generated_ids) + tokens))

    def limit_jobs(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Limits jobs to the budget that earlier turns left, and suspends those without any. Returns the others."""
        return [limited for job in jobs if (limited := self._limit_job(job))] if self._spent else jobs

    def _limit_job(self, job: Job) -> Job | None:
        spent = self._spent.get(job.request.owner, 0)
        if self.tokens is None or not spent:
            return job
        left = self.tokens - spent
        if left <= 0:
            self.suspend(job)
            return None
        return replace(job, request=_limit_request(job.request, min(job.request.params.max_new_tokens, left)))

    def charge(self, job: Job, done: Response) -> bool:
        """Records the tokens of a response. Returns whether only the budget ended it, so that it is to continue.

        A response that is shorter than its request's limit was ended by the model's context: it cannot continue.
        """
        if self.tokens is None or job.max_new_tokens is None:
            return False
        owner, num_tokens = done.request.owner, len(done.token_ids)
        self._spent[owner] = self._spent.get(owner, 0) + num_tokens - job.num_before
        is_at_limit = job.request.params.max_new_tokens <= num_tokens < job.max_new_tokens
        return done.finish_reason == FinishReason.LENGTH and is_at_limit

    def suspend(self, job: Job) -> None:
        self.suspended[job.request.id] = job
        self.num_suspensions += 1
        self._on_suspended()

    def renew(self, gids: Sequence[int] | None) -> list[Job]:
        """Renews the budget of samples of these groups, or of all if None. Returns their suspended jobs."""
        chosen = [name for name, job in self.suspended.items() if gids is None or job.request.owner.gid in gids]
        jobs = [self.suspended.pop(name) for name in chosen]
        if gids is None:
            self._spent.clear()
        for job in jobs:
            self._spent.pop(job.request.owner, None)
        return jobs

    def withdraw(self, request_id: str) -> None:
        """Removes a suspended job, if this request has one."""
        if job := self.suspended.pop(request_id, None):
            self._timeline.drop_tokens(len(job.request.generated_ids))

    def end(self, owner: SampleKey) -> None:
        self._spent.pop(owner, None)

    def observe(self, num_tokens: int) -> None:
        self._mean_length.observe(num_tokens)


def _limit_request(request: Request, max_new_tokens: int) -> Request:
    if request.query_ids:
        return request  # parallel decoding draws all tokens in one pass
    return replace(request, params=request.params.model_copy(update={"max_new_tokens": max_new_tokens}))


class EnginePool:
    """Serves requests on all rollout engines under one dispatch policy.

    Consumes: requests of admitted samples (`submit`, `ask`) and requests from outside the flow (`complete`).
    Produces: one complete response per request, regardless of migrations, suspensions and updates of weights.
    Waits for: devices, in each engine's loop. A sequence that has used up `rollout_budget` is suspended.
    Released by: devices. A publication, a group that is due, or a stall resumes suspended sequences (`resume`).
    """

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[RolloutGroup],
        schedule: Schedule,
        *,
        samples_per_step: int,
        expected_tokens: int,
        on_suspended: Callable[[], None],
        predictor: LengthPredictor | None = None,
        rules: MembershipRules = NO_CHANGES,
    ) -> None:
        """samples_per_step: samples of a step, of which the tail policy moves a share.

        expected_tokens: tokens of a response, until one has ended. on_suspended: called when a sequence is suspended,
        because the trainer may wait for it. predictor: predicts response lengths; if None, the pool learns them. rules:
        of the membership.
        """
        self._cluster = cluster
        self.drivers: list[EngineDriver] = []
        """Engines of the pool. The membership changes the list."""
        self.weights = ServedWeights(cluster.waits, self.drivers, schedule)
        self._dispatcher = Dispatcher(
            cluster,
            engines,
            self.drivers,
            self.weights,
            schedule,
            samples_per_step=samples_per_step,
            on_response=self._take_response,
        )
        self.membership = Membership(cluster, schedule, self.drivers, self.weights, self._dispatcher, rules)
        """Engines that join, leave, or are lost and return."""
        self.drivers += [self.membership.make_driver(engine) for engine in engines]
        self._predictor, ranks = predictor, self._dispatcher.ranks_by_length
        self._lengths = _choose_predictor(predictor, float(expected_tokens), ranks=ranks)
        self._budget = TokenBudget(
            schedule, cluster.timeline, expected_tokens=expected_tokens, on_suspended=on_suspended
        )
        self._owners: dict[SampleKey, list[str]] = {}
        """Unfinished samples, each with the ids of its requests."""
        self._wave: dict[str, tuple[Request, Deliver, OnDraft | None]] = {}
        """Turns that were requested in the current iteration of the event loop."""

    def follow(self, schedule: Schedule) -> None:
        """Takes dispatch, concurrency and the treatment of updates from another schedule, between two steps."""
        self.weights.follow(schedule)
        self.membership.follow(schedule)
        if self._dispatcher.follow(schedule):
            ranks = self._dispatcher.ranks_by_length
            self._lengths = _choose_predictor(self._predictor, self._budget.mean_tokens, ranks=ranks)

    def start(self) -> None:
        for driver in self.drivers:
            self.membership.start(driver)

    def admit(self, keys: Sequence[SampleKey], *, as_episodes: bool = False) -> None:
        """Allows a wave of samples to submit, until finish() or cancel(). as_episodes: the samples run episode code."""
        self._dispatcher.use_all_engines()
        self._owners.update([(key, []) for key in keys])
        if as_episodes:
            self._dispatcher.tool_waits.begin(keys)

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Dispatches the only request of each of some admitted samples. Its response ends the sample, as finish() does.

        deliver: called with each response, but not after withdraw(). `rollout_budget` limits the tokens of a sample
        between two publications.
        """

        def finish_sample(response: Response) -> None:
            self.finish(response.request.owner)
            deliver(response)

        for request in requests:
            self._owners[request.owner].append(request.id)
        self._submit_requests([(request, finish_sample, None) for request in requests])

    def _submit_requests(self, requests: Sequence[tuple[Request, Deliver, OnDraft | None]]) -> None:
        jobs = [
            self._make_job(request, deliver, request.params.max_new_tokens, on_draft)
            for request, deliver, on_draft in requests
        ]
        self._dispatcher.dispatch(self._budget.limit_jobs(jobs))

    def ask(self, request: Request, deliver: Deliver, on_draft: OnDraft | None = None) -> None:
        """Submits one turn of an episode, in one wave with all turns of this iteration of the event loop.

        The budget of a sample is over all its turns. Concurrent turns each get the budget that is left when they are
        dispatched. deliver: see submit(). on_draft: called with each draft before the response, if the request streams.
        """
        self._owners[request.owner].append(request.id)
        if not self._wave:
            asyncio.get_running_loop().call_soon(self._submit_wave)
        self._wave[request.id] = request, deliver, on_draft
        self._dispatcher.tool_waits.begin_turn(request)

    def _submit_wave(self) -> None:
        wave, self._wave = self._wave, {}
        self._submit_requests([*wave.values()])

    async def complete(
        self, requests: Sequence[Request], *, who: str, on_draft: OnDraft | None = None
    ) -> list[Response]:
        """Serves requests as answer(). Raises UserError if an engine refuses a request."""
        found = await self.answer(requests, who=who, on_draft=on_draft)
        if refused := [response.failure for response in found if response.failure]:
            raise UserError(f"the engine refused a request of {who}: {refused[0]}")
        return found

    async def answer(self, requests: Sequence[Request], *, who: str, on_draft: OnDraft | None = None) -> list[Response]:
        """Serves requests from outside the flow, without gate and budget. Returns the responses in order.

        The wait-for graph shows the given name. on_draft: see ask().
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        jobs = [
            Job(
                request=request,
                order=FIRST,
                expected_tokens=_expect_tokens(self._lengths, request),
                deliver=partial(settle, future),
                on_draft=on_draft,
                max_new_tokens=None,
            )
            for request, future in zip(requests, futures, strict=True)
        ]
        self._dispatcher.dispatch(jobs, self.drivers)
        try:
            return [await self._cluster.waits.wait_for(future, who=who, what="a response") for future in futures]
        finally:
            for request, future in zip(requests, futures, strict=True):
                if future.cancelled() or not future.done():
                    self.withdraw(request.id)

    def update_weights(self, ref: WeightRef) -> None:
        """Gives new weights to every engine, which swaps as soon as `on_update` allows."""
        self.weights.publish(ref)
        self._dispatcher.gather(len(self._owners))

    async def swapped(self, version: int, *, who: str = "publication") -> None:
        """Waits until every engine of the pool serves `version` or a newer one, under a name for the wait-for graph."""
        await self.weights.wait_for(version, who=who)

    def resume(self, gids: Sequence[int] | None = None) -> bool:
        """Renews the budget of samples of these groups, or of all if None. Returns whether it resumed any."""
        jobs = self._budget.renew(gids)
        self._dispatcher.dispatch(jobs)
        return bool(jobs)

    @property
    def num_suspended(self) -> int:
        """Sequences whose budget is used up."""
        return len(self._budget.suspended)

    def engine_metrics(self) -> Metrics:
        """Returns the metrics of the engines up to their last swap of weights: sums, and of shares the means.

        Also returns the numbers of sequences, since the start, that were interrupted, migrated or suspended.
        """
        suspended = Counter({"suspended": self._budget.num_suspensions})
        found = sum((driver.calls.counts for driver in self.drivers), suspended)
        counts = {f"num_{name}": float(found[name]) for name in ("interrupted", "migrated", "suspended")}
        counts |= {"most_versions": float(self.weights.most_versions)}
        counts |= {**self._dispatcher.homes.metrics(), **self._lengths.metrics()}
        return counts | join_metrics([driver.metrics for driver in self.drivers])

    def finish(self, key: SampleKey) -> None:
        """Ends a generated sample. Few enough samples may be left for the tail policy."""
        self.cancel(key)
        self._dispatcher.gather(len(self._owners))

    def cancel(self, key: SampleKey) -> None:
        """Ends a sample and withdraws its requests. Does nothing if the sample has ended."""
        for request_id in self._owners.pop(key, ()):
            self.withdraw(request_id)
        self._dispatcher.end_sample(key)
        self._budget.end(key)

    def withdraw(self, request_id: str) -> None:
        """Ends a request without a response. Does nothing if it has a response."""
        self._wave.pop(request_id, None)
        self._budget.withdraw(request_id)
        self._dispatcher.withdraw(request_id)
        self._lengths.forget(request_id)
        self._dispatcher.tool_waits.end_turn(request_id, None)

    def _take_response(self, job: Job, response: Response) -> None:
        """Delivers a response of an engine, or suspends its request if the budget is used up."""
        request, num_tokens = response.request, len(response.token_ids)
        driver = self._dispatcher.end_job(request.id)
        limit = None if response.failure else job.max_new_tokens
        if limit is not None and self._budget.charge(job, response):
            driver.calls.drop_context(request.owner)  # the sequence may continue on another engine
            self._budget.suspend(self._make_job(response.resumed, job.deliver, limit, job.on_draft))
            return
        self._dispatcher.tool_waits.end_turn(request.id, driver)
        if limit is not None:
            if request.may_continue:
                self._dispatcher.homes.record_turn(response, driver)
            self._lengths.observe(request, num_tokens)
            self._budget.observe(num_tokens)
        job.deliver(response)

    def _make_job(self, request: Request, deliver: Deliver, max_new_tokens: int, on_draft: OnDraft | None) -> Job:
        """Makes the job of a sample's request within the budget. max_new_tokens: limit without the budget."""
        expected, homes = _expect_tokens(self._lengths, request), self._dispatcher.homes
        return Job(
            request=self._budget.limit_request(request, max_new_tokens),
            order=-expected if self._dispatcher.ranks_by_length else request.owner.gid,
            expected_tokens=expected,
            deliver=deliver,
            on_draft=on_draft,
            max_new_tokens=max_new_tokens,
            asked_s=self._cluster.clock.now(),
            num_before=len(request.generated_ids),
            num_history=homes.history(request) if homes else 0,
        )


def _expect_tokens(lengths: LengthPredictor, request: Request) -> float:
    return len(request.prompt_ids) + lengths.expect(request)


def join_metrics(engines: Sequence[Metrics]) -> Metrics:
    """Returns the sums of the engines' metrics. Of a share, returns the mean, by its SHARES."""
    found: Metrics = {}
    for name in dict.fromkeys(name for metrics in engines for name in metrics):
        own = [metrics for metrics in engines if name in metrics]
        weights = [metrics.get(SHARES[name], 1.0) if name in SHARES else 1.0 for metrics in own]
        total = sum(weight * metrics[name] for weight, metrics in zip(weights, own, strict=True))
        found[name] = total / (sum(weights) or 1.0) if name in SHARES else total
    return found


def _choose_predictor(predictor: LengthPredictor | None, expected_tokens: float, *, ranks: bool) -> LengthPredictor:
    """Returns the given predictor if dispatch ranks requests by length, else one that learns from responses."""
    return predictor if predictor and ranks else LengthRanker(expected_tokens, learns=ranks)
