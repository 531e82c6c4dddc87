"""Membership of the engine pool: engines join, leave, are lost and return during a run."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.core.causes import Cause
from interlace.core.errors import InterlaceError, RestartBudgetError, WorkerDiedError
from interlace.core.recovery import RestartBudget
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_job import Job
from interlace.rollouts.role_groups import RolloutGroup
from interlace.runtime.cluster import Cluster
from interlace.weights.ref import WeightRef

if TYPE_CHECKING:
    from interlace.rollouts.pool import EnginePool

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
"""Initial and maximum delay between two attempts to recover an engine, in seconds."""
LOOK_EVERY_S = 0.02
"""Interval, in seconds, of checks whether a leaving engine has no more jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """State of one engine, for reports to users."""

    name: str
    state: str
    """State: serving, leaving or lost."""
    version: int
    num_running: int
    num_queued: int
    reason: str = ""
    """Reason of the loss. Empty unless the engine is lost."""


class Membership:
    """Adds, removes and recovers the engines of a pool.

    Consumes: losses that drivers report, and requests to add or remove engines.
    Produces: engines that serve the newest weights.
    Waits for: lost servers, each in a separate task.
    Released by: a server that responds again.
    """

    def __init__(self, cluster: Cluster, pool: "EnginePool") -> None:
        self._cluster, self._pool = cluster, pool
        self.may_change = False
        """True if engines may join or leave by commands."""
        self.keeps_published = False
        """True if engines may join or return between two publications, so that published weights must not change."""
        self.watch_every_s: float | None = None
        """Interval of health checks of idle engines, in seconds. If None, a loss is found with the next job only."""
        self.lost_s = 600.0
        """Seconds without any engine after which the run ends."""
        self.probe_ids: Sequence[int] = ()
        """Tokens of a fixed text, by which the weights of servers are checked. Empty if no engine is a server."""
        self.on_note: Callable[[str], None] = lambda _: None
        """Receiver of notes about engines, which are shown to users."""
        self._parked: list[Job] = []
        """Jobs that no engine can take now."""
        self._lost: dict[EngineDriver, str] = {}
        """Engines that are lost, each with the reason."""
        self._loops: dict[EngineDriver, asyncio.Task[None]] = {}
        self._recoveries: dict[EngineDriver, asyncio.Task[None]] = {}
        """Recovery of each lost engine."""
        self.num_lost = 0
        """Number of losses since the start."""
        self.restarts = RestartBudget("rollout", None)
        """Budget of losses, each of which is a restart."""

    def start(self, driver: EngineDriver) -> None:
        """Starts the loop of an engine."""
        if self.watch_every_s is not None and not self._loops:
            self._cluster.spawn(self._watch(self.watch_every_s), name="engine health")
        self._loops[driver] = self._cluster.spawn(driver.run(), name=driver.group.name)

    def bring_weights(self, driver: EngineDriver, ref: WeightRef) -> None:
        """Gives one engine new weights."""
        self._pool.num_unswapped += driver.pending_version is None
        driver.update_weights(ref)

    def park(self, jobs: Sequence[Job]) -> None:
        """Keeps jobs until an engine returns."""
        self._parked += jobs

    def withdraw(self, request_id: str) -> None:
        """Removes a kept job, if there is one for this request."""
        for job in [each for each in self._parked if each.request.id == request_id]:
            self._parked.remove(job)
            self._cluster.timeline.drop_tokens(len(job.request.generated_ids))

    def on_lost(self, driver: EngineDriver, reason: str) -> None:
        """Moves the jobs of a lost engine, with their tokens, to other engines, and starts its recovery."""
        if driver in self._lost or driver not in self._pool.drivers:
            return
        self.num_lost += 1
        if exhausted := self.restarts.spend(self._cluster.clock.now()):
            raise RestartBudgetError(f"{exhausted} (cause: {Cause.ENGINE}). {driver.group.name} was lost: {reason}")
        self._lost[driver] = reason
        self.on_note(f"{driver.group.name} is lost: {reason}")
        driver.leave(self._others(driver))
        driver.lose_weights()
        self._recoveries[driver] = self._cluster.spawn(
            self._bring_back(driver), name=f"recovery of {driver.group.name}"
        )

    async def add(self, launch: Awaitable[RolloutGroup]) -> EngineDriver:
        """Adds an engine, which takes requests once it serves the newest weights. Other engines do not wait for it."""
        with self._cluster.waits.operation(who="engines", what="start of a joiner"):
            driver = self._pool.make_driver(await launch)
        driver.is_away = True
        self._pool.drivers.append(driver)
        self.start(driver)
        self._join(driver)
        self.on_note(f"{driver.group.name} has joined")
        return driver

    def join(self, driver: EngineDriver) -> None:
        """Lets an engine that left without being removed serve again. A lost one joins at its recovery."""
        if driver not in self._lost:
            self._join(driver)

    async def remove(self, driver: EngineDriver, *, drains: bool) -> None:
        """Removes an engine. drains: its running requests finish there first; else other engines continue them.

        Raises InterlaceError if it is the last engine.
        """
        if not self._others(driver):
            raise InterlaceError(f"{driver.group.name} is the last engine: add another before it leaves.")
        self._lost.pop(driver, None)
        driver.leave(self._others(driver), drains=drains)
        with self._cluster.waits.operation(who="engines", what=f"leave of {driver.group.name}"):
            await self._until_empty(driver)
            await self._give_up(driver)  # it may be lost since it began to leave
        self._pool.num_unswapped -= driver.pending_version is not None
        self._pool.drivers.remove(driver)
        self._pool.standing.fire()
        self._loops.pop(driver).cancel()
        await self._cluster.dismiss(driver.group)
        self.on_note(f"{driver.group.name} has left")

    async def _give_up(self, driver: EngineDriver) -> None:
        """Ends the recovery of an engine, with the processes that it is starting."""
        self._lost.pop(driver, None)
        if recovery := self._recoveries.pop(driver, None):
            recovery.cancel()
            await asyncio.wait({recovery})

    def states(self) -> list[EngineState]:
        """Lists the states of all engines."""
        return [self._state(driver) for driver in self._pool.drivers]

    def _state(self, driver: EngineDriver) -> EngineState:
        state = "lost" if driver in self._lost else "leaving" if driver.is_away else "serving"
        return EngineState(
            name=driver.group.name,
            state=state,
            version=driver.version,
            num_running=len(driver.jobs.running),
            num_queued=driver.jobs.num_queued,
            reason=self._lost.get(driver, ""),
        )

    def _others(self, driver: EngineDriver) -> list[EngineDriver]:
        return [other for other in self._pool.drivers if other is not driver and not other.is_away]

    async def _bring_back(self, driver: EngineDriver) -> None:
        since_s, retry_s = self._cluster.clock.now(), FIRST_RETRY_S
        with self._cluster.waits.operation(who=driver.group.name, what="recovery"):
            await self._until_empty(driver)
            while driver in self._lost:
                await driver.group.revive()
                reason = await driver.group.recover()
                if not reason:
                    break
                self._lost[driver] = reason
                if self._cluster.clock.now() - since_s > self.lost_s and not self._others(driver):
                    raise InterlaceError(
                        f"no engine has served for {self.lost_s:.0f} s (rollout.lost_s). {driver.group.name} was lost "
                        f"and could not be brought back: {reason}"
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        self._recoveries.pop(driver, None)
        if self._lost.pop(driver, None) is not None:
            self._join(driver)
            self.on_note(f"{driver.group.name} is back")

    def _join(self, driver: EngineDriver) -> None:
        """Lets an engine serve as soon as it has the newest weights."""
        if self._pool.newest is not None:
            self.bring_weights(driver, self._pool.newest)
        driver.join()
        parked, self._parked = self._parked, []
        self._pool.on_partials(parked)

    async def _until_empty(self, driver: EngineDriver) -> None:
        while driver.jobs.running or driver.is_evacuating:
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for driver in [*self._pool.drivers]:
                if driver.is_away or driver.jobs.running:
                    continue  # a running call reports a loss
                if reason := await _find_loss(driver.group):
                    self.on_lost(driver, reason)


async def _find_loss(group: RolloutGroup) -> str:
    """Returns the reason why an idle engine is lost, or an empty text."""
    try:
        return await group.ask(RolloutGroup.health)
    except WorkerDiedError as error:
        if not group.can_revive:
            raise
        return str(error)
