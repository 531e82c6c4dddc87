"""Everything in this process: a worker is a thread, breakpoints work. Only the ranks of a group have processes."""

import asyncio
import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from interlace.core.errors import RemoteError, UserError
from interlace.runtime.clock import Clock
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.group import Ran, Rank, turn_of
from interlace.runtime.local.spawned import SpawnedRank, find_rendezvous
from interlace.runtime.process.shared import SharedArrays, SharedFolder, shared_folder
from interlace.runtime.turnstile import OneByOne, Turnstile
from interlace.runtime.worker import Rendezvous, Worker, WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


class ThreadRank:
    """A worker on a thread of its own, so that its operations run one at a time, in the order of the calls."""

    def __init__(self, context: WorkerContext, clock: Clock) -> None:
        self._context, self._clock = context, clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{context.group}.{context.rank}")
        self._worker: Worker | None = None
        self._turn = asyncio.Lock()

    async def start(self, factory: Callable[[WorkerContext], Worker]) -> None:
        """Constructs the worker. A UserError passes as it is; anything else becomes a RemoteError."""
        loop = asyncio.get_running_loop()
        try:
            self._worker = await loop.run_in_executor(self._thread, factory, self._context)
        except UserError:
            raise
        except Exception as error:
            raise self._remote("__init__") from error

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """On the thread; a coroutine function on the event loop."""
        function, now = getattr(self._worker, method), self._clock.now

        def run() -> Ran:
            start_s = now()
            value = function(*args, **kwargs)
            return Ran(value, start_s, now())

        try:
            if asyncio.iscoroutinefunction(function):
                async with turn_of(self._worker, method, self._turn):
                    start_s = now()
                    value = await function(*args, **kwargs)
                    return Ran(value, start_s, now())
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except UserError:
            raise
        except Exception as error:
            raise self._remote(method) from error

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Directly: concurrent operations are thread-safe and return at once."""
        getattr(self._worker, method)(*args)

    async def close(self) -> None:
        """Lets the running operation end, and the worker with it."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await asyncio.get_running_loop().run_in_executor(self._thread, worker.close)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _remote(self, method: str) -> RemoteError:
        return RemoteError(self._context.group, self._context.rank, method, traceback.format_exc())


class LocalCluster(Cluster):
    """The embedded default."""

    def __init__(self, devices: Sequence[Device], schedule: Schedule, *, hang_after_s: float) -> None:
        super().__init__(devices, schedule, hang_after_s=hang_after_s)
        self._turnstile = Turnstile()
        self._spawned: list[SpawnedRank] = []
        self._folder: SharedFolder | None = None
        self._shared: SharedArrays | None = None

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        if spec.num_ranks == 1:
            rank = ThreadRank(context, self.clock)
            await rank.start(spec.factory)
            return OneByOne(rank, self._turnstile)
        spawned = SpawnedRank(context, self.clock, self._shared, self.fail)
        self._spawned.append(spawned)
        await spawned.start(spec.factory, self._folder.path if self._folder else None)
        self.processes.append(spawned)
        return OneByOne(spawned, self._turnstile)

    async def _turn(self) -> None:
        await self._turnstile.passed()

    async def _rendezvous(self, spec: WorkerSpec) -> Rendezvous:  # noqa: ARG002 - every device is on this machine
        if self._folder is None and (folder := shared_folder()):
            self._folder, self._shared = folder, SharedArrays(folder.path, passes_on=True)
        return find_rendezvous()

    async def shutdown(self) -> None:
        """Ends all workers."""
        await super().shutdown()
        for rank in self._spawned:  # those whose group never came to be
            await rank.close()
        if self._folder:
            self._folder.remove()


def host_memory_bytes() -> int:
    """Memory of this machine, bounded by the container's limit where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
