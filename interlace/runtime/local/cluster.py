"""Cluster in this process: each worker is a thread, so breakpoints work. Only groups of several ranks use processes."""

import asyncio
import shutil
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from interlace.core.errors import RemoteError, UserError
from interlace.core.processes import name_own_folder, remove_left_folders
from interlace.core.tasks import is_cancelled
from interlace.runtime.cluster import Cluster
from interlace.runtime.local.own_thread import OwnThread
from interlace.runtime.local.spawned import SpawnedRank
from interlace.runtime.process.mail import FolderDirectory, close_mailboxes
from interlace.runtime.process.shared import SharedArrays, SharedFolder, make_shared_folder
from interlace.runtime.rank import Rank, RankResult, turn_of
from interlace.runtime.result_order import ResultOrder
from interlace.runtime.waits import Clock
from interlace.runtime.worker import RAISED, Rendezvous, Worker, WorkerContext, WorkerSpec
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

MAIL = "interlace-mail-"
"""Prefix of the folder of a run's mailboxes, before its process and a secret."""
HURRIED_S = 1.0
"""Seconds that a running operation has to end if the run ends in a hurry."""


class ThreadRank:
    """A worker on a dedicated thread. Its operations run one at a time, in the order of the calls."""

    def __init__(self, context: WorkerContext, clock: Clock, patience_s: Callable[[], float]) -> None:
        """patience_s: returns how long close() waits for a running operation."""
        self._context, self._clock, self._patience_s = context, clock, patience_s
        self._thread = OwnThread(f"{context.group}.{context.rank}")
        self._worker: Worker | None = None
        self._turn = asyncio.Lock()

    async def start(self, factory: Callable[[WorkerContext], Worker]) -> None:
        """Constructs the worker. A UserError passes unchanged; any other error becomes a RemoteError."""

        def make() -> Worker:
            with self._convert_errors("__init__"):
                return factory(self._context)

        self._worker = await asyncio.wrap_future(self._thread.submit(make))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[RankResult]:
        """Runs an operation on the thread, or a coroutine function on the event loop."""
        function, now = getattr(self._worker, method), self._clock.now
        if asyncio.iscoroutinefunction(function):
            return self._await_operation(method, partial(function, *args, **kwargs))

        def run() -> RankResult:
            with self._convert_errors(method):
                start_s = now()
                value = function(*args, **kwargs)
                return RankResult(value, start_s, now())

        return asyncio.wrap_future(self._thread.submit(run))

    async def _await_operation(self, method: str, operation: Callable[[], Awaitable[Any]]) -> RankResult:
        with self._convert_errors(method):
            async with turn_of(self._worker, method, self._turn):
                start_s = self._clock.now()
                value = await operation()
                return RankResult(value, start_s, self._clock.now())

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs an operation directly. Concurrent operations are thread-safe and return at once."""
        getattr(self._worker, method)(*args)

    async def close(self) -> None:
        """Waits for the running operation, then ends the worker. An operation that never ends is abandoned."""
        worker, self._worker = self._worker, None
        reached = asyncio.wrap_future(self._thread.submit(lambda: None))
        await asyncio.wait({reached}, timeout=self._patience_s())
        closed = self._thread.submit(worker.close if worker else lambda: None)
        self._thread.end()
        if reached.done():
            await asyncio.wrap_future(closed)

    @contextmanager
    def _convert_errors(self, method: str) -> Iterator[None]:
        """Converts errors raised inside to RemoteError, except a UserError and the cancellation of the calling task."""
        try:
            yield
        except UserError:
            raise
        except RAISED as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            raise RemoteError(self._context.group, self._context.rank, method, traceback.format_exc()) from error


class LocalCluster(Cluster):
    """The default cluster, embedded in the controller's process."""

    def __init__(self, devices: Sequence[Device], schedule: Schedule, *, hang_after_s: float) -> None:
        super().__init__(devices, schedule, hang_after_s=hang_after_s)
        self._result_order = ResultOrder(self.watchdog.at_rest)
        self._folder: SharedFolder | None = None
        self._shared: SharedArrays | None = None
        self._directory: FolderDirectory | None = None
        self._after_workers.callback(self.spawn(self.processes.watch_stopped(), name="stopped ranks").cancel)

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        if spec.num_ranks == 1 and not spec.may_die:
            rank = ThreadRank(context, self.clock, self._patience_s)
            await rank.start(spec.factory)
            return rank
        spawned = SpawnedRank(context, self.clock, self._shared, self._make_failure_handler(spec))
        self._after_workers.push_async_callback(spawned.close)
        self.processes.watch(spawned)
        await spawned.start(spec.factory, self._folder.path if self._folder else None, spec.preload)
        if not spec.may_die:
            self.processes.add(spawned)
        return spawned

    def mail_directory(self) -> FolderDirectory:
        if self._directory is None:
            parent = Path(tempfile.gettempdir())
            remove_left_folders(parent, MAIL)
            made = self._directory = FolderDirectory(parent / name_own_folder(MAIL))
            self._after_workers.callback(made.remove)
            self._after_workers.callback(close_mailboxes, made)
        self._directory.shared = self._folder.path if self._folder else None
        return self._directory

    async def _rendezvous(self, spec: WorkerSpec) -> Rendezvous:  # noqa: ARG002 - every device is on this machine
        if self._folder is None and (folder := make_shared_folder()):
            self._folder, self._shared = folder, SharedArrays(folder.path, passes_on=True)
            self._after_workers.callback(folder.remove)
        # Mode 0700: only this user can enter, and thus join.
        made = tempfile.mkdtemp(prefix="interlace-meeting-", dir=self._folder.path if self._folder else None)
        self._after_workers.callback(shutil.rmtree, made, ignore_errors=True)
        return Rendezvous(url=f"file://{made}/store")

    def _patience_s(self) -> float:
        """Returns how long the end waits for a thread, which cannot be killed: as for a hang, or less in a hurry."""
        return HURRIED_S if self.tasks.hurries else self.watchdog.hang_after_s
