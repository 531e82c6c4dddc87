"""Drives one rollout engine: submits requests, returns responses, swaps weights and yields devices."""

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from interlace.core.errors import WorkerDiedError
from interlace.core.state_parts import WEIGHTS
from interlace.core.types import Metrics
from interlace.rollouts.engine_calls import EngineCalls, GenerationMeter
from interlace.rollouts.engine_jobs import EngineJobs, Job, ResponseReceiver
from interlace.rollouts.pending_swaps import PendingSwaps
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.weight_swap import WeightSwap
from interlace.runtime.cluster import Cluster
from interlace.runtime.waits import Clock, Signal
from interlace.schedule.concurrency import create_limit
from interlace.schedule.schedule import Schedule
from interlace.weights.ref import WeightRef

ROUNDING_S = 1e-6
"""Rounding tolerance of clocks, in seconds."""


class Phase(Enum):
    """Activity of an engine's loop."""

    IDLE = "idle"
    """The engine waits for work or for its devices."""
    HOLDING = "holding"
    """The engine holds its devices between two calls, or during the abort of its sequences."""
    GENERATING = "generating"
    """A call decodes; it must be interrupted if something changes."""
    SWAPPING = "swapping"
    """The pending weights are being installed."""


NEXT_PHASES = {
    Phase.IDLE: (Phase.HOLDING,),
    Phase.HOLDING: (Phase.GENERATING, Phase.SWAPPING),
    Phase.GENERATING: (Phase.HOLDING,),
    Phase.SWAPPING: (Phase.HOLDING,),
}
"""Phases that may follow each phase. IDLE may follow all, because the engine's process may end at any time."""


class Standing(Enum):
    """Relation of an engine to its pool."""

    MEMBER = "member"
    AWAY = "away"
    """The engine takes no jobs, and its weights are not updated."""
    LOST = "lost"
    """The engine is away, and only the membership may let it join again."""
    LEAVING = "leaving"
    """The engine is away, and does not join again."""


class EngineHost(ResponseReceiver, Protocol):
    """Receiver of a driver's reports: the dispatcher of the engine pool."""

    def fill(self, driver: "EngineDriver") -> None:
        """Gives an engine requests that are queued for engines with pending weights."""

    def dispatch(self, jobs: Sequence[Job], onto: "list[EngineDriver] | None" = None) -> None:
        """Dispatches unfinished jobs again, which an engine gave up. onto: if given, only to these engines."""


class EngineDriver:
    """Loop of one rollout engine (`run`).

    Consumes: jobs (`submit`), new weights (`update_weights`), cancellations.
    Produces: responses and drafts for the dispatcher of the pool.
    Waits for: work, then devices. It holds the devices until no work is left or another role requests them.
    Released by: a job, new weights, the device lock.
    """

    def __init__(
        self,
        group: RolloutGroup,
        cluster: Cluster,
        schedule: Schedule,
        host: EngineHost,
        *,
        swaps: "PendingSwaps[EngineDriver]",
        on_lost: "Callable[[EngineDriver, str], None]",
        standing: Standing = Standing.MEMBER,
    ) -> None:
        """swaps: pending swaps of all engines of the pool. on_lost: called with the reason if the engine is lost.

        Its jobs move to other engines, and it may return.
        """
        self.group = group
        self.jobs = EngineJobs(self._note_state)
        self.load = self.jobs.load
        self.metrics: Metrics = {}
        """Metrics of the engine between its last two swaps of weights."""
        meter = GenerationMeter(group, cluster.timeline)
        self.weights = WeightSwap(group, schedule, self.jobs, meter.recompute)
        self.calls = EngineCalls(group, self.jobs, meter, self.weights, create_limit(schedule.concurrency), host)
        self.evacuation = Evacuation(self.jobs, self.calls, host, self._wake)
        self._hold = DeviceHold(schedule, cluster.clock, on_recompute=meter.recompute, wake=self._wake)
        self._host, self._swaps, self._on_lost = host, swaps, on_lost
        self.number = swaps.number_engine()
        """Number in the order of creation."""
        self._work = Signal(cluster.waits)
        self._phase, self._concurrency = Phase.IDLE, schedule.concurrency
        self._is_interrupted = False
        self.standing = standing
        """Relation to the pool. The transitions are leave(), join() and lose_weights()."""
        group.state.set_driver(self._hold)
        self._note_state()

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def is_away(self) -> bool:
        return self.standing is not Standing.MEMBER

    def _note_state(self) -> None:
        """Records whether new requests start here, and whether queued ones wait that others may start earlier.

        Called after each change of the standing, the pending weights, or the first job of the queue.
        """
        self._swaps.open.update(self, is_open=not self.is_away and self.weights.starts_new)
        if self.jobs.num_queued and not self.is_away and not self.weights.starts_new:
            self._swaps.queues[self] = None
        else:
            self._swaps.queues.pop(self, None)

    def follow(self, schedule: Schedule) -> None:
        """Takes the treatment of updates and the limit of sequences from another schedule."""
        self.weights.follow(schedule)
        if schedule.concurrency != self._concurrency:  # an adaptive limit learns, so it stays if the setting stays
            self._concurrency = schedule.concurrency
            self.calls.limit = create_limit(schedule.concurrency)
        self._wake()

    def submit(self, job: Job) -> None:
        self.jobs.add(self.calls.order(job))
        self._wake()

    def cancel(self, request_id: str) -> None:
        """Ends a job without a delivery. Does nothing if the engine has no such job."""
        if self.calls.cancel(request_id):
            self._wake()

    def update_weights(self, ref: WeightRef) -> None:
        """Swaps to new weights as soon as `on_update` allows. A newer version replaces a pending one.

        An engine that generates first fetches weights from a store, and then ends its call itself.
        """
        self.weights.receive(ref)
        self._note_state()
        if ref.is_stored and self._phase is Phase.GENERATING:
            self.group.notify(RolloutGroup.expect_weights, ref)
        else:
            self._wake()

    def leave(self, others: "list[EngineDriver]", *, drains: bool = False, for_good: bool = False) -> None:
        """Moves all jobs to the other engines and takes no more until join().

        drains: running jobs finish here. for_good: the engine does not join again.
        """
        if for_good:
            self.standing = Standing.LEAVING
        elif self.standing is Standing.MEMBER:
            self.standing = Standing.AWAY
        self._note_state()
        self._host.dispatch(self.jobs.take_queue(), others)
        self._swaps.changed.fire()
        if not drains:
            self.evacuation.begin(others)

    def lose_weights(self) -> None:
        """Marks the engine as lost, and its weights as unknown until its next swap."""
        self.weights.forget()
        if self.standing is not Standing.LEAVING:
            self.standing = Standing.LOST
        self._note_state()

    def join(self) -> None:
        """Takes jobs again, after the newest weights have arrived. Does nothing if the engine leaves for good."""
        if self.standing is Standing.LEAVING:
            return
        self.standing = Standing.MEMBER
        self._note_state()
        self._wake()

    async def run(self) -> None:
        while True:
            while not self._has_work():
                await self._work.wait(who=self.group.name, what="requests or weights")
            try:
                async with self.group.hold("generate"):
                    self._enter_phase(Phase.HOLDING)
                    self._hold.begin()
                    await self._serve_jobs()
            except WorkerDiedError as error:
                if not self.group.can_revive:
                    raise
                self._lose_process(str(error))
            finally:
                self._enter_phase(Phase.IDLE)  # also if an engine that leaves is in the middle of a swap
                self._hold.end()

    def _enter_phase(self, phase: Phase) -> None:
        """Changes the phase of the loop. The end of SWAPPING, by a loss too, ends the pending swap."""
        assert phase is Phase.IDLE or phase in NEXT_PHASES[self._phase], f"{self._phase} cannot become {phase}"
        before, self._phase = self._phase, phase
        if before is Phase.SWAPPING:
            self._swaps.finish()

    def _lose_process(self, reason: str) -> None:
        """Returns the running jobs to the pool, to begin again from their requests, and reports the loss."""
        jobs = self.calls.forget()
        self.evacuation.end()
        self._enter_phase(Phase.IDLE)
        self._on_lost(self, reason)
        self._host.dispatch(jobs)

    def _has_work(self) -> bool:
        if self.calls.has_work or self.evacuation.is_due:
            return True
        if self.is_away:
            return False
        if self.weights.has_pending and self.evacuation.num_awaited:
            return self.weights.has_ready_job()  # otherwise it would hold its devices while it waits for these jobs
        return self.weights.has_pending or self.jobs.num_queued > 0

    def _find_work(self) -> bool:
        """Takes over requests queued for other engines, unless the engine must drain, leave or yield its devices."""
        if self._swaps.num and self.weights.starts_new and not self.is_away and not self._hold.is_requested:
            self._host.fill(self)
        return self._has_work()

    async def _serve_jobs(self) -> None:
        while self._has_work() or self._find_work():
            await self.evacuation.move()
            if not self.is_away:
                await self._swap_if_due()
            if self._hold.is_over():  # another role requested the devices before this hold began, or during the swap
                return
            self._find_work()
            admitted = [] if self.is_away else self.calls.admit()
            if not self.calls.has_work:
                continue
            self._enter_phase(Phase.GENERATING)
            self._is_interrupted = False
            progress, span = await self.calls.serve(admitted)
            self._enter_phase(Phase.HOLDING)
            self.calls.record(progress, span)
            if progress.lost:
                self._on_lost(self, progress.lost)
            elif self._hold.is_over():
                return

    async def _swap_if_due(self) -> None:
        # A loop, because another version may be published during a swap.
        while ref := self.weights.take_due(self.evacuation.num_awaited):
            self._note_state()
            self._enter_phase(Phase.SWAPPING)
            if self.weights.aborts_sequences and self.jobs.running:
                self._host.dispatch(await self.calls.abort_all("interrupted"))
            await self.weights.install(ref)
            if not self.weights.keeps_contexts:
                self.calls.drop_contexts()
            self.metrics = {**await self.group.engine_metrics(), **self.calls.limit.metrics()}
            is_lost = self.metrics.pop("is_lost", 0.0)
            self._enter_phase(Phase.HOLDING)
            if is_lost:
                self._on_lost(self, await self.group.health())

    def _wake(self) -> None:
        """Wakes the loop, and ends a running call after its current decode step.

        One interrupt a call is enough. While devices change owners, thousands of engines are woken by each of them.
        """
        self._work.fire()
        if self._phase is Phase.GENERATING and not self._is_interrupted:
            self._is_interrupted = True
            self.group.notify(RolloutGroup.interrupt)


class Evacuation:
    """Moves the running jobs of one engine to others, which do not swap weights until the jobs have arrived.

    Consumes: requests to empty the engine (`begin`).
    Produces: partials, dispatched to the given engines (`move`).
    Waits for: the end of the engine's current call.
    Released by: the abort of the engine's sequences, or the loss of the engine (`end`).
    """

    def __init__(self, jobs: EngineJobs, calls: EngineCalls, host: EngineHost, wake: Callable[[], None]) -> None:
        """wake: called when the engine has to act."""
        self._jobs, self._calls, self._host, self._wake = jobs, calls, host, wake
        self._onto: list[EngineDriver] | None = None
        """Engines to which the running jobs will move; None if they stay."""
        self.num_awaited = 0
        """Number of engines whose running jobs will move here and continue under this engine's current weights."""

    @property
    def is_due(self) -> bool:
        return self._onto is not None

    def begin(self, onto: "list[EngineDriver]") -> None:
        """Requests that all running jobs move to the given engines. Does nothing if none runs or they move already."""
        if not self._jobs.running or self._onto is not None:
            return
        self._onto = onto
        for driver in onto:
            driver.evacuation.num_awaited += 1
        self._wake()

    async def move(self) -> None:
        onto = self._onto
        if onto is not None:
            self._host.dispatch(await self._calls.abort_all("migrated"), onto)
            self.end()

    def end(self) -> None:
        """Ends the evacuation: the other engines wait for no more jobs of this one."""
        onto, self._onto = self._onto or [], None
        for driver in onto:
            driver.evacuation.num_awaited -= 1
            driver.evacuation._wake()


class DeviceHold:
    """Decides when an engine yields its devices: after `min_hold`, if another role requests them.

    The runtime calls it as the driver of the worker group (`interlace.runtime.rank.Driver`).
    """

    def __init__(
        self, schedule: Schedule, clock: Clock, *, on_recompute: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        """on_recompute: called when the engine will recompute the KV cache of its running sequences.

        wake: called when the engine must look at the hold, during a call too.
        """
        self._clock, self._on_recompute, self._wake = clock, on_recompute, wake
        self._min_hold = schedule.min_hold
        self._drops_cache = schedule.kv_on_switch == "recompute"
        self._since_s = 0.0
        """Time at which the engine got its devices."""
        self.is_requested = False
        """True from the request of another role until the engine has released its devices."""

    def is_over(self) -> bool:
        return self.is_requested and self._clock.now() - self._since_s >= self._min_hold - ROUNDING_S

    def begin(self) -> None:
        """Records that the engine got its devices. They may have been requested since they were granted."""
        self._since_s = self._clock.now()
        if self.is_requested:
            self.ask_to_yield()

    def end(self) -> None:
        self.is_requested = False

    def ask_to_yield(self) -> None:
        """Requests the devices. The engine yields them after `min_hold`."""
        self.is_requested = True
        left = self._since_s + self._min_hold - self._clock.now()
        if left > ROUNDING_S:
            asyncio.get_running_loop().call_later(left, self._wake)
        else:
            self._wake()

    @property
    def unload_arguments(self) -> tuple[str, ...]:
        return ("recompute",) if self._drops_cache else ()

    def record_unloaded(self, parts: Sequence[str]) -> None:
        """Records that parts of the engine's state were offloaded from the devices."""
        if self._drops_cache and tuple(parts) != (WEIGHTS,):
            self._on_recompute()
