"""An event loop on a thread, for synchronous callers."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from interlace.core.tasks import cancel_tasks

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until close()."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine concurrently with others."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result, or raises its exception."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Cancels all tasks and ends the thread."""
        if self.loop.is_closed():
            return
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def _cancel_others() -> None:
    await cancel_tasks(asyncio.all_tasks() - {asyncio.current_task()})
