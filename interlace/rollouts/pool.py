"""The engine pool, which dispatches requests to all rollout engines and returns their responses."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Metrics, Request, Response, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_job import Deliver, Job, OnDraft
from interlace.rollouts.gathering import Gathering
from interlace.rollouts.homes import Homes
from interlace.rollouts.levelling import Levelling
from interlace.rollouts.membership import Membership
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.tool_waits import ToolWaits
from interlace.runtime.cluster import Cluster
from interlace.runtime.decode_curve import DecodeCurve
from interlace.runtime.waits import Signal
from interlace.schedule.dispatch import create_dispatch
from interlace.schedule.lengths import LengthPredictor, LengthRanker, MeanLength
from interlace.schedule.routing import route
from interlace.schedule.schedule import Schedule
from interlace.schedule.tail import Migrate
from interlace.weights.ref import WeightRef

FIRST = -math.inf
"""Order of requests from outside the flow: before new samples, because a step boundary waits for these requests."""


def settle(future: "asyncio.Future[Response]", response: Response) -> None:
    """Sets the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(response)


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
    ) -> None:
        """samples_per_step: samples of a step, of which the tail policy moves a share.

        expected_tokens: tokens of a response, until one has ended. on_suspended: called when a sequence is suspended,
        because the trainer may wait for it. predictor: predicts response lengths; if None, the pool learns them.
        """
        self._cluster = cluster
        self._policy = create_dispatch(schedule.dispatch)
        self._schedule, self._prefill_cost, self._predictor = schedule, schedule.prefill_cost, predictor
        self.follow: Callable[[Schedule], None] = self._follow
        self._mean_length = MeanLength(float(expected_tokens))
        self.standing = Signal(cluster.waits)
        """Fires when an engine has swapped or left."""
        self.newest: WeightRef | None = None
        """Weights of the last publication."""
        self.num_unswapped = 0
        """Number of engines with pending weights."""
        self._most_versions = 1
        """Most versions that engines served at the same time, since the start."""
        self._lengths = _choose_predictor(predictor, float(expected_tokens), ranks=self._policy.longest_first)
        self.curve = DecodeCurve() if self._policy.adapts else None
        """Decode speed of the engines. None if the dispatch policy does not use it."""
        self._on_suspended = on_suspended
        self._services = (cluster.waits, cluster.clock, cluster.timeline, schedule, self)
        self.make_driver: Callable[[RolloutGroup], EngineDriver] = lambda group: EngineDriver(group, *self._services)
        self.drivers = [self.make_driver(engine) for engine in engines]
        self.membership = Membership(cluster, self)
        """Engines that join, leave, or are lost and return."""
        self.on_lost: Callable[[EngineDriver, str], None] = self.membership.on_lost
        self._gathering = None
        if isinstance(schedule.tail, Migrate):
            self._gathering = Gathering(
                schedule.tail, cluster, self.drivers, samples_per_step=samples_per_step, drains=self._drains
            )
        self.fill: Callable[[EngineDriver], None] = Levelling(self.drivers, self.on_partials).fill
        self._kept: list[EngineDriver] = self.drivers
        """Engines that get requests of samples. Fewer than all while the tail of a step is gathered."""
        self._owners: dict[SampleKey, list[str]] = {}
        """Unfinished samples, each with the ids of its requests."""
        self._driver_of: dict[str, EngineDriver] = {}
        self.listeners: dict[str, OnDraft] = {}
        """Receivers of the drafts of requests that stream."""
        self._suspended: dict[str, Job] = {}
        self._num_suspensions = 0
        self._homes = Homes(keeps_old=schedule.on_update == "keep")
        self._tool_waits = ToolWaits(cluster.timeline, self.drivers)
        self._wave: dict[str, tuple[Request, Deliver]] = {}
        """Turns that were requested in the current iteration of the event loop."""
        self._spent: dict[SampleKey, int] = {}
        """Tokens of a sample's requests since the last publication. Empty without a budget."""

    @property
    def _drains(self) -> bool:
        return self._schedule.on_update == "drain"

    def _follow(self, schedule: Schedule) -> None:
        """Takes dispatch, concurrency and the treatment of updates from another schedule, between two steps."""
        before, self._schedule = self._schedule, schedule
        self._homes.keeps_old = schedule.on_update == "keep"
        if self._gathering:
            self._gathering.drains = self._drains
        if schedule.dispatch != before.dispatch:
            self._policy = create_dispatch(schedule.dispatch)
            self._lengths = _choose_predictor(
                self._predictor, self._mean_length.tokens, ranks=self._policy.longest_first
            )
            self.curve = DecodeCurve() if self._policy.adapts else None
        self._services = (*self._services[:3], schedule, self)
        for driver in self.drivers:
            driver.follow(schedule)

    def start(self) -> None:
        """Starts the engines' loops."""
        for driver in self.drivers:
            self.membership.start(driver)

    def admit(self, keys: Sequence[SampleKey], *, as_episodes: bool = False) -> None:
        """Allows a wave of samples to submit, until finish() or cancel(). as_episodes: the samples run episode code."""
        self._kept = self.drivers
        self._owners.update([(key, []) for key in keys])
        if as_episodes:
            self._tool_waits.begin(keys)

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Dispatches requests of admitted samples. deliver: called with each response, but not after withdraw().

        `rollout_budget` limits the tokens of a sample between two publications, over all its turns. Concurrent requests
        of a sample each get the budget that is left when they are dispatched.
        """
        for request in requests:
            self._owners[request.owner].append(request.id)
        self._submit([(request, deliver) for request in requests])

    def _submit(self, requests: Sequence[tuple[Request, Deliver]]) -> None:
        jobs = [self._job(request, deliver, request.params.max_new_tokens) for request, deliver in requests]
        if self._spent:
            jobs = [job for job in (self._within_rest(job) for job in jobs) if job]
        self._deal(jobs, self._kept)

    def ask(self, request: Request, deliver: Deliver, on_draft: OnDraft | None = None) -> None:
        """Submits one turn of an episode, in one wave with all turns of this iteration of the event loop.

        deliver: see submit(). on_draft: called with each draft before the response, if the request streams.
        """
        if on_draft:
            self.listeners[request.id] = on_draft
        self._owners[request.owner].append(request.id)
        if not self._wave:
            asyncio.get_running_loop().call_soon(self._submit_wave)
        self._wave[request.id] = request, deliver
        self._tool_waits.begin_turn(request)

    def _submit_wave(self) -> None:
        wave, self._wave = self._wave, {}
        self._submit([*wave.values()])

    async def complete(
        self, requests: Sequence[Request], *, who: str, on_draft: OnDraft | None = None
    ) -> list[Response]:
        """Serves requests from outside the flow, without gate and budget. Returns the responses in order.

        The wait-for graph shows the given name. on_draft: see ask(). UserError if an engine refuses a request.
        """
        if on_draft:
            self.listeners.update((request.id, on_draft) for request in requests)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        jobs = [
            Job(
                request=request,
                order=FIRST,
                expected_tokens=self._expect_tokens(request),
                deliver=partial(settle, future),
                max_new_tokens=None,
            )
            for request, future in zip(requests, futures, strict=True)
        ]
        self._deal(jobs, self.drivers)  # to all engines, even while a tail is gathered on fewer
        try:
            found = [await self._cluster.waits.wait_for(future, who=who, what="a response") for future in futures]
        finally:
            for request, future in zip(requests, futures, strict=True):
                if future.cancelled() or not future.done():
                    self.withdraw(request.id)
        if refused := [response.refusal for response in found if response.refusal]:
            raise UserError(f"the engine refused a request of {who}: {refused[0]}")
        return found

    def update_weights(self, ref: WeightRef) -> None:
        """Gives new weights to every engine, which swaps as soon as `on_update` allows."""
        self.newest = ref
        for driver in self.drivers:
            self.membership.bring_weights(driver, ref)
        self._gather()

    @property
    def drains_for(self) -> int | None:
        """Version that all engines drain for, so that none starts a request. None if an engine starts requests."""
        here = [driver for driver in self.drivers if not driver.is_away]
        pending = [driver.pending_version for driver in here if driver.pending_version is not None]
        return min(pending) if self._drains and pending and len(pending) == len(here) else None

    async def swapped(self, version: int, *, who: str = "publication") -> None:
        """Waits until every engine of the pool serves `version` or a newer one, under a name for the wait-for graph."""
        while any(driver.version < version and not driver.is_away for driver in self.drivers):
            await self.standing.wait(who=who, what=f"all engines to serve version {version}")

    def resume(self, gids: Sequence[int] | None = None) -> bool:
        """Renews the budget of samples of these groups, or of all if None. Returns whether it resumed any."""
        chosen = [name for name, job in self._suspended.items() if gids is None or job.request.owner.gid in gids]
        jobs = [self._suspended.pop(name) for name in chosen]
        if gids is None:
            self._spent.clear()
        for job in jobs:
            self._spent.pop(job.request.owner, None)
        self._deal(jobs, self._kept)
        return bool(jobs)

    @property
    def num_suspended(self) -> int:
        """Sequences whose budget is used up."""
        return len(self._suspended)

    def engine_metrics(self) -> Metrics:
        """Returns the metrics of the engines up to their last swap of weights, summed over engines.

        Also returns the numbers of sequences, since the start, that were interrupted, migrated or suspended.
        """
        found = sum((driver.counts for driver in self.drivers), Counter({"suspended": self._num_suspensions}))
        counts = {f"num_{name}": float(found[name]) for name in ("interrupted", "migrated", "suspended")}
        counts |= {"most_versions": float(self._most_versions), **self._homes.metrics(), **self._lengths.metrics()}
        names = dict.fromkeys(name for driver in self.drivers for name in driver.metrics)
        return counts | {name: sum(driver.metrics.get(name, 0.0) for driver in self.drivers) for name in names}

    def finish(self, key: SampleKey) -> None:
        """Ends a generated sample. Few enough samples may be left for the tail policy."""
        self.cancel(key)
        self._gather()

    def cancel(self, key: SampleKey) -> None:
        """Ends a sample and withdraws its requests. Does nothing if the sample has ended."""
        for request_id in self._owners.pop(key, ()):
            self.withdraw(request_id)
        if self._homes:
            self._homes.end(key)
        if self._tool_waits:
            self._tool_waits.end(key)
        if self._spent:
            self._spent.pop(key, None)

    def withdraw(self, request_id: str) -> None:
        """Ends a request without a response. Does nothing if it has a response."""
        suspended = self._suspended.pop(request_id, None)
        self.listeners.pop(request_id, None)
        self._wave.pop(request_id, None)
        if suspended:
            self._cluster.timeline.drop_tokens(len(suspended.request.generated_ids))
        elif request_id in self._driver_of:
            self._driver_of.pop(request_id).cancel(request_id)
        self.membership.withdraw(request_id)
        self._lengths.forget(request_id)
        self._tool_waits.end_turn(request_id, None)

    def on_response(self, job: Job, response: Response) -> None:
        """Delivers a response of an engine, or suspends its request if the budget is used up."""
        done = response.completion
        driver = self._driver_of.pop(done.request.id)
        if self.num_unswapped:
            serving = {each.version for each in self.drivers if each.jobs.running} | {driver.version}
            self._most_versions = max(self._most_versions, len(serving))
        if job.max_new_tokens is None or response.refusal:
            self._tool_waits.end_turn(done.request.id, driver)
            self._deliver(job, response)
            return
        owner = done.request.owner
        if self._budget is not None:
            self._spent[owner] = self._spent.get(owner, 0) + len(done.token_ids) - job.num_before
            if done.finish_reason == FinishReason.LENGTH and len(done.token_ids) < job.max_new_tokens:
                self._suspend(self._job(done.resumed, job.deliver, job.max_new_tokens))
                return
        self._tool_waits.end_turn(done.request.id, driver)
        if done.request.may_continue:
            self._homes.answered(done, driver)
        self._lengths.observe(done.request, len(done.token_ids))
        self._mean_length.observe(len(done.token_ids))
        self._deliver(job, response)

    @property
    def _budget(self) -> int | None:
        """Tokens that a sample may generate between two publications. None without a limit."""
        return self._schedule.budget_tokens(self._mean_length.tokens)

    def _deliver(self, job: Job, response: Response) -> None:
        self.listeners.pop(job.request.id, None)
        job.deliver(response)

    def on_partials(self, jobs: Sequence[Job], onto: "list[EngineDriver] | None" = None) -> None:
        """Dispatches unfinished jobs again, which an engine gave up. onto: if given, only to these engines."""
        self._deal(jobs, onto or self._kept)

    def on_swapped(self) -> None:
        """Wakes the tasks that wait for a version."""
        self.num_unswapped -= 1
        self.standing.fire()

    def _deal(self, jobs: Sequence[Job], drivers: list[EngineDriver]) -> None:
        if not jobs:
            return
        here = [driver for driver in drivers if not driver.is_away] or [
            driver for driver in self.drivers if not driver.is_away
        ]
        if not here:
            self.membership.park(jobs)
            return
        ready = [driver for driver in here if driver.starts_new] or here
        if self.curve and (costs := self.curve.costs()):
            self._policy.learn(costs)
        expected, loads = [job.expected_tokens for job in jobs], [driver.load for driver in ready]
        kept = self._homes.kept(jobs, ready) if self._homes else [None] * len(jobs)
        chosen = route(self._policy, expected, kept, loads, prefill_cost=self._prefill_cost)
        for job, engine in zip(jobs, chosen, strict=True):
            if self._homes:
                self._homes.goes_to(job, ready[engine])
            self._driver_of[job.request.id] = ready[engine]
            ready[engine].submit(job)
        self._tool_waits.look()

    def _job(self, request: Request, deliver: Deliver, max_new_tokens: int) -> Job:
        """Makes the job of a sample's request within the budget. max_new_tokens: limit without the budget."""
        expected = self._expect_tokens(request)
        if self._budget is not None:
            request = _limit_request(request, min(max_new_tokens, len(request.generated_ids) + self._budget))
        return Job(
            request=request,
            order=-expected if self._policy.longest_first else request.owner.gid,
            expected_tokens=expected,
            deliver=deliver,
            max_new_tokens=max_new_tokens,
            asked_s=self._cluster.clock.now(),
            num_before=len(request.generated_ids),
            num_history=self._homes.history(request) if self._homes else 0,
        )

    def _within_rest(self, job: Job) -> Job | None:
        """Limits a job to the budget that earlier turns left. Suspends it and returns None if no budget is left."""
        spent = self._spent.get(job.request.owner, 0)
        if self._budget is None or not spent:
            return job
        left = self._budget - spent
        if left <= 0:
            self._suspend(job)
            return None
        return replace(job, request=_limit_request(job.request, min(job.request.params.max_new_tokens, left)))

    def _suspend(self, job: Job) -> None:
        self._suspended[job.request.id] = job
        self._num_suspensions += 1
        self._on_suspended()

    def _expect_tokens(self, request: Request) -> float:
        return len(request.prompt_ids) + self._lengths.expect(request)

    def _gather(self) -> None:
        """Moves sequences to fewer engines, if the tail policy does so and few enough are left."""
        if self._gathering:
            self._kept = self._gathering.look(self._kept, len(self._owners), drains=self.num_unswapped > 0)


def _limit_request(request: Request, max_new_tokens: int) -> Request:
    if request.query_ids:
        return request  # parallel decoding draws all tokens in one pass
    return replace(request, params=request.params.model_copy(update={"max_new_tokens": max_new_tokens}))


def _choose_predictor(predictor: LengthPredictor | None, expected_tokens: float, *, ranks: bool) -> LengthPredictor:
    """Returns the given predictor if dispatch ranks requests by length, else one that learns from responses."""
    return predictor if predictor and ranks else LengthRanker(expected_tokens, learns=ranks)
