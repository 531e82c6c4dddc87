"""Dispatch of jobs to rollout engines by one policy, also of jobs that an engine gives up.

Samples with several turns return to the engine that has their KV cache.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.trajectory import count_common
from interlace.core.types import Metrics, Request, Response, SampleKey
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_jobs import Job
from interlace.rollouts.gathering import Gathering
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.served_weights import ServedWeights
from interlace.runtime.cluster import Cluster
from interlace.runtime.decode_curve import DecodeCurve
from interlace.runtime.timeline import Timeline, ToolWait
from interlace.schedule.dispatch import Load, create_dispatch
from interlace.schedule.loads import KeptContext, route
from interlace.schedule.schedule import Migrate, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    driver: EngineDriver
    num_tokens: int
    """Computed tokens of the last turn's context and answer."""
    version: int
    """Version that the engine served at the end of the last turn."""
    last: Response
    """Response of the last turn."""


class Homes:
    """Tracks the engine of each sample's last turn, which holds the sample's KV cache."""

    def __init__(self, *, keeps_old: bool) -> None:
        """keeps_old: whether engines retain KV caches of older weights."""
        self.keeps_old = keeps_old
        self._homes: dict[SampleKey, _Home] = {}
        self._num_history = self._num_reused = 0
        """Context tokens from earlier turns since the last call of metrics(), and the reused ones among them."""

    def __bool__(self) -> bool:
        """Returns whether any sample has a turn to continue. No other method matters before."""
        return bool(self._homes)

    def find_kept(
        self, jobs: Sequence[Job], find_place: Callable[[EngineDriver], int | None]
    ) -> list[KeptContext | None]:
        """Returns the retained context of each job. find_place: returns the index of an engine, if it may be chosen."""
        return [self._find_context(job, find_place) for job in jobs]

    def _find_context(self, job: Job, find_place: Callable[[EngineDriver], int | None]) -> KeptContext | None:
        home = self._homes.get(job.request.owner)
        place = None if home is None else find_place(home.driver)
        if home is None or place is None:
            return None
        if home.version != home.driver.version and not self.keeps_old:
            return None
        return KeptContext(engine=place, num_tokens=home.num_tokens)

    def record_engine(self, job: Job, driver: EngineDriver) -> None:
        """Records the engine of a job, and releases the context that another engine retained for the sample."""
        home = self._homes.get(job.request.owner)
        if home is not None and home.driver is not driver:
            home.driver.calls.release(job.request.owner)

    def record_turn(self, done: Response, driver: EngineDriver) -> None:
        """Records that an engine finished a turn of a sample that may have further turns."""
        request = done.request
        before = self._homes.get(request.owner)
        if before is not None:
            if before.driver is not driver:  # of a concurrent turn
                before.driver.calls.release(request.owner)
            history = min(before.num_tokens, len(request.prompt_ids))
            self._num_history += history
            self._num_reused += min(history, done.num_cached_tokens)
        num_tokens = len(request.prompt_ids) + len(done.token_ids) - 1
        self._homes[request.owner] = _Home(driver=driver, num_tokens=num_tokens, version=driver.version, last=done)

    def history(self, request: Request) -> int:
        """Counts the common tokens at the beginning of a request's context and of its sample's last turn."""
        home = self._homes.get(request.owner)
        if home is None:
            return 0
        computed = np.concatenate([np.asarray(home.last.request.prompt_ids), np.asarray(home.last.token_ids[:-1])])
        return count_common(np.asarray(request.prompt_ids), computed)

    def end(self, owner: SampleKey) -> None:
        home = self._homes.pop(owner, None)
        if home is not None:
            home.driver.calls.release(owner)

    def metrics(self) -> Metrics:
        """Returns the reused share of earlier turns' tokens since the last call. Empty if no turn followed another."""
        if not self._num_history:
            return {}
        share = self._num_reused / self._num_history
        self._num_history = self._num_reused = 0
        return {"history_reused": share}


class Dispatcher:
    """Assigns jobs to engines by the dispatch policy, and to fewer engines at the tail of a step.

    Consumes: jobs, and unfinished jobs that an engine gives up (`dispatch`).
    Produces: jobs of drivers. Their responses go to `on_response`, which is the pool's.
    Waits for: nothing. If all engines are away, jobs stay here.
    Released by: an engine that joins (`dispatch_parked`).
    """

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[RolloutGroup],
        drivers: list[EngineDriver],
        weights: ServedWeights,
        schedule: Schedule,
        *,
        samples_per_step: int,
        on_response: Callable[[Job, Response], None],
    ) -> None:
        """engines: engines at the start. drivers: engines of the pool, which may change later.

        samples_per_step: samples of a step, of which the tail policy moves a share. on_response: see `EngineHost`.
        """
        self._drivers, self._weights, self._timeline = drivers, weights, cluster.timeline
        self.on_response = on_response
        self._schedule = schedule
        self._prefill_cost = schedule.prefill_cost
        self._set_policy(schedule)
        self._gathering = None
        if isinstance(schedule.tail, Migrate):
            drains = schedule.on_update == "drain"
            self._gathering = Gathering(
                schedule.tail, cluster, engines, drivers, samples_per_step=samples_per_step, drains=drains
            )
        self._kept: list[EngineDriver] = drivers
        """Engines that get requests of samples. Fewer than all while the tail of a step is gathered."""
        self._driver_of: dict[str, EngineDriver] = {}
        self._parked: list[Job] = []
        """Jobs that no engine can take now."""
        self.homes = Homes(keeps_old=schedule.on_update == "keep")
        self.tool_waits = ToolWaits(cluster.timeline, drivers)

    def follow(self, schedule: Schedule) -> bool:
        """Takes the dispatch policy and the treatment of updates from another schedule.

        Returns whether the policy changed.
        """
        before, self._schedule = self._schedule, schedule
        self.homes.keeps_old = schedule.on_update == "keep"
        if self._gathering:
            self._gathering.drains = schedule.on_update == "drain"
        if schedule.dispatch == before.dispatch:
            return False
        self._set_policy(schedule)
        return True

    def _set_policy(self, schedule: Schedule) -> None:
        self._policy = create_dispatch(schedule.dispatch)
        self.ranks_by_length = self._policy.longest_first
        """True if long responses start first."""
        self.curve = DecodeCurve() if self._policy.adapts else None
        """Decode speed, fitted to each call of an engine. None if the dispatch policy does not use it."""

    def use_all_engines(self) -> None:
        """Ends the gathering of a tail: all engines get requests of samples again."""
        self._kept = self._drivers

    def gather(self, num_left: int) -> None:
        """Moves sequences to fewer engines, if the tail policy does so and few enough are left.

        num_left: number of unfinished samples.
        """
        if self._gathering:
            self._kept = self._gathering.look(self._kept, num_left, drains=self._weights.pending.num > 0)

    def dispatch(self, jobs: Sequence[Job], onto: list[EngineDriver] | None = None) -> None:
        """Gives each job to an engine.

        onto: the engines to choose from, even while a tail is gathered on fewer. If None, the engines of the tail.
        """
        if not jobs:
            return
        before = [self._driver_of.get(job.request.id) for job in jobs] if self.tool_waits else []
        ready, loads = self._list_ready(onto or self._kept)
        if not ready:
            self._parked += jobs
            self.tool_waits.look(before)
            return
        if self.curve and (costs := self.curve.costs()):
            self._policy.learn(costs)
        expected = [job.expected_tokens for job in jobs]
        kept = self._find_kept(jobs, ready)
        chosen = route(self._policy, expected, kept, loads, prefill_cost=self._prefill_cost)
        for job, engine in zip(jobs, chosen, strict=True):
            if self.homes:
                self.homes.record_engine(job, ready[engine])
            self._driver_of[job.request.id] = ready[engine]
            ready[engine].submit(job)
        if self.tool_waits:
            self.tool_waits.look([*before, *(ready[engine] for engine in chosen)])

    def _find_kept(self, jobs: Sequence[Job], ready: list[EngineDriver]) -> Sequence[KeptContext | None]:
        """Returns the context of each job that an engine retains, with the index of the engine in `ready`."""
        if not self.homes:
            return [None] * len(jobs)
        open_engines = self._weights.pending.open
        if ready is open_engines.drivers:
            return self.homes.find_kept(jobs, open_engines.find_place)
        return self.homes.find_kept(jobs, {driver: place for place, driver in enumerate(ready)}.get)

    def _list_ready(self, drivers: list[EngineDriver]) -> tuple[list[EngineDriver], Sequence[Load]]:
        """Returns the given engines that start new requests, with their loads. If none of them does, the members."""
        open_engines = self._weights.pending.open
        if drivers is self._drivers and open_engines.drivers:
            return open_engines.drivers, open_engines.loads
        here = [driver for driver in drivers if not driver.is_away] or [
            driver for driver in self._drivers if not driver.is_away
        ]
        ready = [driver for driver in here if driver.weights.starts_new] or here
        return ready, [driver.load for driver in ready]

    def dispatch_parked(self) -> None:
        """Gives the jobs that no engine could take to the engines that are present now."""
        parked, self._parked = self._parked, []
        self.dispatch(parked)

    def end_sample(self, key: SampleKey) -> None:
        """Releases the context that an engine holds for a sample, and ends its waits for tools."""
        if self.homes:
            self.homes.end(key)
        if self.tool_waits:
            self.tool_waits.end(key)

    def withdraw(self, request_id: str) -> None:
        """Ends a job without a delivery. Does nothing if no engine has it and it is not parked."""
        if driver := self._driver_of.pop(request_id, None):
            driver.cancel(request_id)
            self.tool_waits.look((driver,))
        for job in [each for each in self._parked if each.request.id == request_id]:
            self._parked.remove(job)
            self._timeline.drop_tokens(len(job.request.generated_ids))

    def fill(self, driver: EngineDriver) -> None:
        """Gives an engine queued requests of engines with pending weights, first from the engine with the largest load.

        Those engines start no request before the swap. An engine that has swapped starts them earlier under the same
        version. The samples do not change, because the request is the key of its sampling noise.
        """
        for source in sorted(self._weights.pending.queues, key=lambda other: (-other.load.live_tokens, other.number)):
            if jobs := source.jobs.give(driver.calls.room, driver.load.live_tokens):
                self.dispatch(jobs, [driver])

    def end_job(self, request_id: str) -> EngineDriver:
        """Forgets the job of a request that has its response. Returns the engine that served it."""
        driver = self._driver_of.pop(request_id)
        self._weights.count_versions(driver)
        return driver


class ToolWaits:
    """Tracks for each sample whether a turn is in progress or whether its episode's code and tools run.

    An engine waits if it has no requests while the code or tools of a sample run whose last turn it generated. Before
    the first turn of a sample, all engines wait for it.
    """

    def __init__(self, timeline: Timeline, drivers: Sequence[EngineDriver]) -> None:
        """drivers: engines of the pool, which may change later; see `look`."""
        self._timeline, self._drivers = timeline, drivers
        self._num_turns: dict[SampleKey, int] = {}
        """Number of turns in progress, by sample."""
        self._homes: dict[SampleKey, EngineDriver | None] = {}
        self._owners: dict[str, SampleKey] = {}
        """Sample of each turn in progress."""
        self._away: Counter[EngineDriver | None] = Counter()
        """Number of samples without a turn in progress, by engine."""
        self._open: dict[EngineDriver, ToolWait] = {}
        """Engines that wait now, each with its wait in the timeline."""
        self._changed: dict[EngineDriver | None, None] = {}
        """Engines to read at the next look, in the order of their changes."""
        self._was_everywhere = False
        """True if all engines waited for a sample without a turn at the last look."""

    def __bool__(self) -> bool:
        """Returns whether any sample runs an episode."""
        return bool(self._num_turns)

    def begin(self, owners: Sequence[SampleKey]) -> None:
        for owner in owners:
            self._num_turns[owner], self._homes[owner] = 0, None
        self._away[None] += len(owners)
        self.look(())

    def begin_turn(self, request: Request) -> None:
        owner = request.owner
        if owner not in self._num_turns:
            return
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] -= 1
            self._changed[self._homes[owner]] = None
        self._num_turns[owner] += 1
        self._owners[request.id] = owner

    def end_turn(self, request_id: str, driver: EngineDriver | None) -> None:
        """Records the end of a turn. driver: driver of the engine that finished it, None if it was withdrawn."""
        owner = self._owners.pop(request_id, None)
        if owner is None:  # the request of an evaluation, for example
            self.look((driver,))
            return
        before = self._homes[owner]
        self._homes[owner] = driver or before
        self._num_turns[owner] -= 1
        if not self._num_turns[owner]:
            self._away[self._homes[owner]] += 1
        self.look((before, driver))

    def end(self, owner: SampleKey) -> None:
        """Records the end of a sample, after all its turns."""
        if self._num_turns.pop(owner, None) is not None:
            home = self._homes.pop(owner)
            self._away[home] -= 1
            self.look((home,))

    def look(self, changed: Iterable[EngineDriver | None]) -> None:
        """Starts and ends the waits of engines in the timeline.

        changed: engines whose requests or samples have changed since the last look. All engines are read only if they
        begin or end to wait for a sample before its first turn.
        """
        if not self._num_turns and not self._open:
            return
        is_everywhere = self._away[None] > 0
        self._changed |= dict.fromkeys(changed)
        drivers = self._drivers if is_everywhere != self._was_everywhere else self._changed
        for driver in drivers:
            if driver is not None:
                self._update(driver, is_everywhere=is_everywhere)
        self._changed, self._was_everywhere = {}, is_everywhere

    def leave(self, driver: EngineDriver) -> None:
        if driver in self._open:
            self._timeline.end_wait(self._open.pop(driver))

    def _update(self, driver: EngineDriver, *, is_everywhere: bool) -> None:
        waits = not driver.load.num_requests and (is_everywhere or self._away[driver] > 0)
        if waits == (driver in self._open):
            return
        if waits:
            self._open[driver] = self._timeline.begin_wait(driver.group.device_indices)
        else:
            self._timeline.end_wait(self._open.pop(driver))
