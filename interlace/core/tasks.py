"""State and end of asyncio's tasks, and an event loop on a thread for synchronous callers."""

import asyncio
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar


def is_cancelled() -> bool:
    """Returns whether the present task was cancelled. False without an event loop.

    The CancelledError of another task, which a function may raise, does not count.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0


async def cancel_tasks(tasks: "Collection[asyncio.Future[Any]]") -> None:
    """Cancels tasks and waits for their ends. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
