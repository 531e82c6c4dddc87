"""Membership of the engine pool: engines join, leave, are lost and return during a run."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from interlace.core.errors import InterlaceError, RestartBudgetError, WorkerDiedError
from interlace.core.recovery import Cause, RestartBudget
from interlace.observe.notes import Notes
from interlace.rollouts.dispatcher import Dispatcher
from interlace.rollouts.driver import EngineDriver, Standing
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.served_weights import ServedWeights
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipRules:
    """Changes of a pool's engines that a run permits, and the watch for losses."""

    may_change: bool = False
    """True if engines may join or leave by commands."""
    watch_every_s: float | None = None
    """Interval of health checks of idle engines, in seconds. If None, a loss is found with the next job only."""
    lost_s: float = 600.0
    """Seconds without any engine after which the run ends."""
    probe_ids: Sequence[int] = ()
    """Tokens of a fixed text, by which the weights of servers are checked. Empty if no engine is a server."""
    restarts_per_hour: int | None = None
    """Losses of engines within an hour, each of which is a restart, after which the run ends. None for no limit."""


NO_CHANGES = MembershipRules()


class Membership:
    """Adds, removes and recovers the engines of a pool.

    Consumes: losses that drivers report, and requests to add or remove engines.
    Produces: engines that serve the newest weights.
    Waits for: lost servers, each in a separate task.
    Released by: a server that responds again.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: Schedule,
        drivers: list[EngineDriver],
        weights: ServedWeights,
        dispatcher: Dispatcher,
        rules: MembershipRules,
    ) -> None:
        """drivers: engines of the pool, which this object changes."""
        self._cluster, self._schedule, self.rules = cluster, schedule, rules
        self._drivers, self._weights, self._dispatcher = drivers, weights, dispatcher
        self.notes = Notes()
        """Notes about engines, which are shown to users."""
        self._left_out: set[EngineDriver] = set()
        """Engines that the current placement leaves out. They do not serve again when they have recovered."""
        self._has_left_out = False
        self._lost: dict[EngineDriver, str] = {}
        """Engines that are lost, each with the reason."""
        self._loops: dict[EngineDriver, asyncio.Task[None]] = {}
        self._recoveries: dict[EngineDriver, asyncio.Task[None]] = {}
        """Recovery of each lost engine."""
        self.num_lost = 0
        """Number of losses since the start."""
        self._restarts = RestartBudget("rollout", rules.restarts_per_hour)

    @property
    def keeps_published(self) -> bool:
        """True if engines may join or return between two publications, so that published weights must not change."""
        return self.rules.may_change or self._has_left_out or any(driver.group.can_revive for driver in self._drivers)

    def follow(self, schedule: Schedule) -> None:
        """Takes another schedule, for the present engines and for those that join later."""
        self._schedule = schedule
        for driver in self._drivers:
            driver.follow(schedule)

    def start(self, driver: EngineDriver) -> None:
        if self.rules.watch_every_s is not None and not self._loops:
            self._cluster.spawn(self._watch_engines(self.rules.watch_every_s), name="engine health")
        self._loops[driver] = self._cluster.spawn(driver.run(), name=driver.group.name)

    def make_driver(self, group: RolloutGroup, standing: Standing = Standing.MEMBER) -> EngineDriver:
        swaps = self._weights.pending
        return EngineDriver(
            group,
            self._cluster,
            self._schedule,
            self._dispatcher,
            swaps=swaps,
            on_lost=self._recover_lost,
            standing=standing,
        )

    def _recover_lost(self, driver: EngineDriver, reason: str) -> None:
        """Moves the jobs of a lost engine, with their tokens, to other engines, and starts its recovery."""
        if driver in self._lost or driver not in self._drivers:
            return
        self.num_lost += 1
        if exhausted := self._restarts.spend(self._cluster.clock.now()):
            raise RestartBudgetError(f"{exhausted} (cause: {Cause.ENGINE}). {driver.group.name} was lost: {reason}")
        self._lost[driver] = reason
        self.notes.add(f"{driver.group.name} is lost: {reason}")
        driver.leave(self._list_others(driver))
        driver.lose_weights()
        self._recoveries[driver] = self._cluster.spawn(
            self._bring_back(driver), name=f"recovery of {driver.group.name}"
        )

    async def add(self, launch: Awaitable[RolloutGroup]) -> EngineDriver:
        """Adds an engine, which takes requests once it serves the newest weights. Other engines do not wait for it."""
        with self._cluster.waits.operation(who="engines", what="start of a joiner"):
            driver = self.make_driver(await launch, Standing.AWAY)
        self._drivers.append(driver)
        self._dispatcher.tool_waits.look((driver,))
        self.start(driver)
        self._join_engine(driver)
        self.notes.add(f"{driver.group.name} has joined")
        return driver

    def follow_placement(self, engines: Sequence[EngineDriver]) -> None:
        """Leaves out all engines except these, if one of these serves. One that was left out serves again.

        A lost engine joins at its recovery.
        """
        for driver in [each for each in engines if each in self._left_out]:
            self._left_out.discard(driver)
            if driver not in self._lost:
                self._join_engine(driver)
        serving = [each for each in engines if not each.is_away]
        for driver in self._drivers:
            if driver not in engines and serving:
                self._left_out.add(driver)
                self._has_left_out = True
                if not driver.is_away:
                    driver.leave(serving)

    async def remove(self, driver: EngineDriver, *, drains: bool) -> None:
        """Removes an engine. drains: its running requests finish there first; else other engines continue them.

        Raises InterlaceError if it is the last engine.
        """
        if not self._list_others(driver):
            raise InterlaceError(f"{driver.group.name} is the last engine: add another before it leaves.")
        self._lost.pop(driver, None)
        driver.leave(self._list_others(driver), drains=drains, for_good=True)
        with self._cluster.waits.operation(who="engines", what=f"leave of {driver.group.name}"):
            await self._until_empty(driver)
            await self._give_up(driver)  # it may be lost since it began to leave
        self._weights.pending.num -= driver.weights.has_pending
        self._drivers.remove(driver)
        self._dispatcher.tool_waits.leave(driver)
        self._weights.pending.changed.fire()
        self._loops.pop(driver).cancel()
        await self._cluster.dismiss(driver.group)
        self.notes.add(f"{driver.group.name} has left")

    async def _give_up(self, driver: EngineDriver) -> None:
        """Ends the recovery of an engine, with the processes that it is starting."""
        self._lost.pop(driver, None)
        if recovery := self._recoveries.pop(driver, None):
            recovery.cancel()
            await asyncio.wait({recovery})

    @property
    def lost_devices(self) -> frozenset[int]:
        """Indices of the devices of lost engines."""
        return frozenset(index for driver in self._lost for index in driver.group.device_indices)

    def states(self) -> list[EngineState]:
        return [self._describe_state(driver) for driver in self._drivers]

    def _describe_state(self, driver: EngineDriver) -> EngineState:
        state = "lost" if driver in self._lost else "leaving" if driver.is_away else "serving"
        return EngineState(
            name=driver.group.name,
            state=state,
            version=driver.version,
            num_running=len(driver.jobs.running),
            num_queued=driver.jobs.num_queued,
            reason=self._lost.get(driver, ""),
        )

    def _list_others(self, driver: EngineDriver) -> list[EngineDriver]:
        return [other for other in self._drivers if other is not driver and not other.is_away]

    async def _bring_back(self, driver: EngineDriver) -> None:
        since_s, retry_s = self._cluster.clock.now(), FIRST_RETRY_S
        with self._cluster.waits.operation(who=driver.group.name, what="recovery", is_pause=True):
            await self._until_empty(driver)
            while driver in self._lost:
                await driver.group.revive()
                reason = await driver.group.recover()
                if not reason:
                    break
                self._lost[driver] = reason
                if self._cluster.clock.now() - since_s > self.rules.lost_s and not self._list_others(driver):
                    raise InterlaceError(
                        f"no engine has served for {self.rules.lost_s:.0f} s (rollout.lost_s). {driver.group.name} was "
                        f"lost and could not be brought back: {reason}"
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        self._recoveries.pop(driver, None)
        if self._lost.pop(driver, None) is not None:
            self.notes.add(f"{driver.group.name} is back")
            if driver not in self._left_out:
                self._join_engine(driver)

    def _join_engine(self, driver: EngineDriver) -> None:
        """Lets an engine serve as soon as it has the newest weights."""
        self._weights.bring_newest(driver)
        driver.join()
        self._dispatcher.dispatch_parked()

    async def _until_empty(self, driver: EngineDriver) -> None:
        while driver.jobs.running or driver.evacuation.is_due:
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch_engines(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for driver in [*self._drivers]:
                if driver.is_away or driver.jobs.running:
                    continue  # a running call reports a loss
                if reason := await _find_loss(driver.group):
                    self._recover_lost(driver, reason)


async def _find_loss(group: RolloutGroup) -> str:
    """Returns the reason why an idle engine is lost, or an empty text."""
    try:
        revival = group.rank_set.revival
        if revival and (death := await revival.find_death(0.0)):
            return str(death)  # of any rank; only the first one answers questions
        return await group.ask(RolloutGroup.health)
    except WorkerDiedError as error:
        if not group.can_revive:
            raise
        return str(error)
