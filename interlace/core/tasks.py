"""State and end of asyncio's tasks."""

import asyncio
from collections.abc import Collection
from typing import Any


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
