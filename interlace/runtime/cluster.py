"""Clusters, which run workers. Three back ends implement one contract."""

import asyncio
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

from interlace.core.errors import (
    NoProgressError,
    RemoteError,
    RestartBudgetError,
    WorkerAbsentError,
    WorkerDiedError,
    WorkerHungError,
)
from interlace.core.processes import kill_if_stopped
from interlace.core.recovery import RestartBudget
from interlace.observe.notes import Notes
from interlace.runtime.device_lock import DeviceLock
from interlace.runtime.group import TypedGroup, WorkerGroup
from interlace.runtime.process.mail import Directory
from interlace.runtime.process.pool import LOOK_S, Place
from interlace.runtime.process.rank import ProcessRank
from interlace.runtime.rank import Rank
from interlace.runtime.result_order import ResultOrder
from interlace.runtime.run_tasks import RunTasks
from interlace.runtime.timeline import Span, Timeline
from interlace.runtime.waits import Clock, LoopClock, WaitRegistry
from interlace.runtime.watchdog import LoopWatch, Watchdog
from interlace.runtime.worker import Rendezvous, Restore, Revival, Worker, WorkerContext, WorkerSpec
from interlace.schedule.placement import Device, resolve
from interlace.schedule.schedule import Schedule

STARTS = 3
"""Starts in a row of a rank in place of a dead one, after which the run starts again."""
W = TypeVar("W", bound=Worker)
T = TypeVar("T")


class WorkerProcesses:
    """The processes of a cluster's workers, in the order of their start."""

    def __init__(self) -> None:
        self._processes: list[ProcessRank] = []
        self._watched: weakref.WeakSet[ProcessRank] = weakref.WeakSet()
        """All processes, also those that are starting or may die."""

    def __iter__(self) -> Iterator[ProcessRank]:
        return iter(self._processes)

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: ProcessRank) -> None:
        self._processes.append(process)

    def watch(self, process: ProcessRank) -> None:
        """Adds a process that is about to start to those that watch_stopped() looks at."""
        self._watched.add(process)

    async def watch_stopped(self) -> None:
        """Looks forever for processes of this machine that a signal has stopped, and kills them.

        They would never answer. Their deaths are then noticed.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for process in [*self._watched]:
                process.was_stopped |= kill_if_stopped(process.process_here)

    def select(self, group: str) -> Sequence[ProcessRank]:
        return [process for process in self._processes if process.name.startswith(f"{group}[")]

    async def find_death(self, group: str | None = None) -> WorkerDiedError | None:
        """Returns the death of a process of a group. If `group` is None, of any process. None if all run."""
        for process in [*self._processes] if group is None else self.select(group):
            if death := await process.death():
                return death
        return None

    def forget(self, group: str) -> None:
        """Removes the processes of a group whose ranks are ended by their group."""
        for process in self.select(group):
            self._processes.remove(process)

    async def close(self, group: str) -> None:
        """Ends the processes of a group and removes them."""
        for process in self.select(group):
            await process.close()
            self._processes.remove(process)


class Cluster(ABC):
    """Devices, workers on them, and the tasks of a run."""

    place_child: Place | None = None
    """Function that starts job processes next to the workers. If None, they start on this machine."""

    def __init__(
        self, devices: Sequence[Device], schedule: Schedule, *, hang_after_s: float, clock: Clock | None = None
    ) -> None:
        """Makes a cluster on a running event loop. hang_after_s: seconds without progress after which the run fails.

        clock: if None, the clock of the event loop.
        """
        self.devices = tuple(devices)
        self.locations = [locate_device(device.name) for device in devices]
        """Text for each device: its machine and name, equal for all cores of a machine and in each process of a run."""
        self._schedule = schedule
        self.clock: Clock = clock or LoopClock(asyncio.get_running_loop())
        self.waits = WaitRegistry(self.clock)
        self.timeline = Timeline(clock=self.clock)
        self.lock = DeviceLock(devices, self.waits, switch=schedule.switch)
        self.watchdog = Watchdog(self.clock, self.waits, hang_after_s=hang_after_s)
        self.groups: list[WorkerGroup[Worker]] = []
        """Workers that were started and have not ended."""
        self._after_workers = AsyncExitStack()
        """Resources released after all groups, last added first: ranks without a group, and shared resources."""
        self._result_order: ResultOrder | None = None
        """None on a virtual clock, on which no results arrive together."""
        self.tasks = RunTasks()
        self.notes = Notes()
        """Notes about processes, which are shown to users."""
        self.processes = WorkerProcesses()
        """Processes of the workers that have a separate process, except workers that may die."""

    def place(self, role: str) -> tuple[tuple[Device, ...], ...]:
        """Returns the devices of each instance of a role. Raises UserError if the placement names a missing device."""
        return self._schedule.placement.instances(role, self.devices)

    async def start(
        self, name: str, worker_class: type[W], *args: object, on: str, may_die: bool = False
    ) -> WorkerGroup[W]:
        """Starts one user-defined worker, made as `worker_class(context, *args)`.

        on: its devices, in the syntax of a placement: `all`, `0`, `50-100%`. may_die: see WorkerSpec. Raises the same
        errors as launch().
        """
        devices = resolve(on, self.devices, role=name)
        factory = partial(_make, worker_class=worker_class, args=args)
        spec = WorkerSpec(name=name, factory=factory, worker_class=worker_class, devices=devices, may_die=may_die)
        return await self.launch(spec)

    def _make_failure_handler(self, spec: WorkerSpec) -> Callable[[Exception], None]:
        """Returns the handler for a rank's failures that no caller waits for."""
        survives = spec.may_die or spec.revival  # then the next call to the rank raises its death, or replaces it

        def report_failure(error: Exception) -> None:
            if not survives or not isinstance(error, WorkerDiedError):
                self.fail(error)

        return report_failure

    async def launch(self, spec: WorkerSpec) -> WorkerGroup[Any]:
        """Starts a group. Raises RemoteError if a constructor fails, UserError if memory does not suffice."""
        ranks = await self._start_ranks(spec, "start")
        group: WorkerGroup[Worker] = WorkerGroup(spec, ranks, self)
        if spec.revival and self.processes.select(spec.name):
            group.rank_set.revival = Revival(
                make_ranks=partial(self._start_again, spec, spec.revival.budget),
                find_death=partial(self._find_death, spec),
                repeats_calls=spec.revival.repeats_calls,
            )
        self.groups.append(group)
        try:
            await _check_memory(self, spec, group)
        except BaseException:  # also if cancelled: nothing else ends a group that its caller did not receive
            await self.dismiss(cast(TypedGroup, group))
            raise
        return group

    async def _start_ranks(self, spec: WorkerSpec, what: str) -> Sequence[Rank]:
        with self.waits.operation(who=spec.name, what=what):
            is_apart = spec.num_ranks > 1 or spec.may_die
            rendezvous = await self._rendezvous(spec) if is_apart else None
            contexts = [
                WorkerContext(
                    group=spec.name,
                    rank=rank,
                    num_ranks=spec.num_ranks,
                    devices=tuple(device.name for device in spec.devices[rank :: spec.num_ranks]),
                    rendezvous=rendezvous,
                    directory=self.mail_directory(),
                )
                for rank in range(spec.num_ranks)
            ]
            return await asyncio.gather(*(self._start_rank(spec, context) for context in contexts))

    async def _start_again(
        self, spec: WorkerSpec, budget: RestartBudget, reason: str, restore: Restore | None
    ) -> Sequence[Rank]:
        """Ends the ranks of a group of which one died, and starts others in their place, with the state of `restore`.

        A single rank that dies during its start is started again, up to STARTS times in a row.
        """
        for number in range(1, STARTS + 1):
            if exhausted := budget.spend(self.clock.now()):
                raise RestartBudgetError(f"{exhausted}. {reason}")
            self.notes.add(f"{reason} Its group starts again.")
            with self.waits.operation(who=spec.name, what="end after a death"):
                await self.processes.close(spec.name)
            try:
                ranks = await self._start_ranks(spec, "start after a death")
                if restore:
                    await _restore_ranks(self.waits, spec.name, ranks, restore)
            except WorkerDiedError as error:
                if isinstance(error, WorkerAbsentError) or spec.num_ranks > 1 or number == STARTS:
                    raise
                reason = str(error)
            else:
                break
        self.notes.add(f"{spec.name} runs again")
        return ranks

    async def _find_death(self, spec: WorkerSpec, within_s: float) -> WorkerDiedError | None:
        deadline_s = self.clock.now() + within_s
        # A look without a wait is no progress: engines are looked at again and again.
        search = self.waits.operation(who=spec.name, what="search for a death")
        with search if within_s else nullcontext():
            while not (death := await self.processes.find_death(spec.name)) and self.clock.now() < deadline_s:
                await asyncio.sleep(within_s / 5)
        return death

    async def dismiss(self, group: TypedGroup) -> None:
        """Ends one group whose work is done."""
        mine = cast(WorkerGroup[Worker], group)  # callers see this group as a TypedGroup
        self.groups.remove(mine)
        self.lock.forget(mine.state)
        self.processes.forget(mine.name)
        with self.waits.operation(who=mine.name, what="close"):
            await mine.close()

    @abstractmethod
    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank: ...

    async def _rendezvous(self, spec: WorkerSpec) -> Rendezvous | None:  # noqa: ARG002 - for clusters of processes
        return None

    def mail_directory(self) -> Directory | None:
        """Returns the directory in which ranks find each other's mailboxes."""
        return None

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> "asyncio.Task[None]":
        """Runs a stage's loop, or a part of its work, until the run ends. Its exception ends the run."""
        return self.tasks.spawn(coroutine, name)

    @asynccontextmanager
    async def waiting(self, who: str, what: str) -> AsyncIterator[None]:
        """Registers a wait for something outside the workers. Then waits for this result's turn (see ResultOrder)."""
        with self.waits.operation(who=who, what=what):
            yield
            await self.wait_turn()

    async def wait_turn(self) -> None:
        """Waits until a result may be processed, if results are processed one at a time."""
        if self._result_order:
            await self._result_order.wait_turn()

    def at_end(self, close: Callable[[], None]) -> None:
        """Registers a function that releases a resource of the run. It is called after all workers have ended."""
        self._after_workers.callback(close)

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error. Only the first error counts."""
        self.tasks.fail(error)

    async def run(self, main: Awaitable[T], *, loop_limit_s: Callable[[], float] | None = None) -> T:
        """Awaits `main`. The first exception of a spawned task, or a hang, ends the run with that exception.

        loop_limit_s: returns how long the event loop may be blocked; called on another thread. If None, as for a hang.
        """
        flow = asyncio.ensure_future(main)
        watch = self._watch(loop_limit_s or (lambda: self.watchdog.hang_after_s))
        try:
            return await self.tasks.wait_for(flow)
        except RemoteError as error:
            # The peers of a process that died fail too, and their errors may arrive first.
            if death := await self.processes.find_death():
                raise death from error
            raise
        except NoProgressError as error:
            if hung := [process.name for process in self.processes if process.open_calls]:
                raise WorkerHungError(f"{', '.join(hung)} did not answer: {error}") from error
            raise
        finally:
            await self.tasks.cancel(flow)
            if watch:
                watch.end()

    def _watch(self, loop_limit_s: Callable[[], float]) -> LoopWatch | None:
        self.spawn(self.watchdog.run(), name="watchdog")
        watch = LoopWatch(self.waits, limit_s=loop_limit_s, on_blocked=self.fail)
        watch.start()
        return watch

    async def shutdown(self) -> None:
        """Ends all workers, even if some fail to end. Then raises the first failure."""
        errors: list[Exception] = []
        async with self._after_workers:
            for group in reversed(self.groups):
                try:
                    await group.close()
                except Exception as error:  # noqa: BLE001 - a worker's close() may raise anything
                    errors.append(error)
            self.groups.clear()
            if errors:
                raise errors[0]


async def _check_memory(cluster: Cluster, spec: WorkerSpec, group: WorkerGroup[Worker]) -> None:
    """Measures a started group, and unloads it from devices with memory of their own. Raises UserError."""
    await group.state.measure_memory()
    if spec.devices:
        cluster.lock.check_fit(group.state)
        if _has_own_memory(spec.devices[0]):
            # Made on its devices but loaded only when called: others may need the memory.
            with cluster.waits.operation(who=spec.name, what="offload"):
                await asyncio.gather(*(rank.call("offload", (), {}) for rank in group.rank_set.ranks))
                await cluster.wait_turn()


def locate_device(local_name: str, machine: str = "") -> str:
    """Returns a text for a device of a machine, equal for all its cores. local_name: torch's name on the machine."""
    return f"{machine} {'cpu' if local_name.startswith('cpu') else local_name}".strip()


def _has_own_memory(device: Device) -> bool:
    """Returns True for a GPU. A CPU device uses the memory of the host."""
    return device.pool == "cuda"


def _make(context: WorkerContext, worker_class: type[W], args: Sequence[Any]) -> W:
    return worker_class(context, *args)


async def record_work(cluster: Cluster, who: str, what: str, work: Coroutine[Any, Any, object]) -> None:
    """Runs work outside the workers as a recorded span, and as a wait. who: group of the span. what: its operation."""
    timeline, clock = cluster.timeline, cluster.clock
    start_s, end_s = clock.now(), math.inf
    span = Span(
        start_s=start_s,
        devices=(),
        group=who,
        rank=0,
        operation=what,
        cause=what,
        step=timeline.step,
        version=timeline.version,
    )
    timeline.begin(span)
    try:
        async with cluster.waiting(who, what):
            await work
            end_s = clock.now()
    finally:
        timeline.end(span, start_s, min(end_s, clock.now()))


async def _restore_ranks(waits: WaitRegistry, name: str, ranks: Sequence[Rank], restore: Restore) -> None:
    with waits.operation(who=name, what="restoration after a death"):
        await restore(ranks)
