"""State of asyncio's tasks."""

import asyncio


def is_cancelled() -> bool:
    """Returns whether the present task was cancelled. False without an event loop.

    The CancelledError of another task, which a function may raise, does not count.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0
