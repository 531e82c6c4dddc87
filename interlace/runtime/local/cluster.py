"""Everything in this process: a rank is a thread, breakpoints work, nothing to install."""

import asyncio
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from interlace.core.errors import RemoteError, UserError
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.group import Rank, turn_of
from interlace.runtime.worker import Worker, WorkerContext


class ThreadRank:
    """A worker on a thread of its own, so that its operations run one at a time, in the order of the calls."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
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

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On the thread; a coroutine function on the event loop."""
        function = getattr(self._worker, method)
        try:
            if asyncio.iscoroutinefunction(function):
                async with turn_of(self._worker, method, self._turn):
                    return await function(*args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
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

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        rank = ThreadRank(context)
        await rank.start(spec.factory)
        return rank


def host_memory_bytes() -> int:
    """Memory of this machine, bounded by the container's limit where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
