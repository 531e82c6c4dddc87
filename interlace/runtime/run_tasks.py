"""Tasks of a run. The first failure of one ends the run."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from interlace.core.errors import HangError, StoppedError
from interlace.core.tasks import cancel_tasks

T = TypeVar("T")


class RunTasks:
    """The tasks of a run besides its flow, and the failure that ends the run."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hurries = False
        """True if the run ends without waiting for running operations, because it hangs or was stopped."""

    @property
    def have_failed(self) -> bool:
        """True once the run has failed. Its tasks then do not end by themselves."""
        return self._failed.done()

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Runs a coroutine until the run ends. Its exception ends the run."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error. Only the first error counts."""
        if not self._failed.done():
            self.hurries = isinstance(error, HangError | StoppedError)
            self._failed.set_exception(error)

    async def wait_for(self, flow: "asyncio.Future[T]") -> T:
        """Returns the flow's result. Raises the flow's error, or the first failure of a task."""
        try:
            outcomes: set[asyncio.Future[Any]] = {flow, self._failed}
            await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            if not flow.done():
                self._failed.result()
            return flow.result()
        except asyncio.CancelledError:
            self.hurries = True
            raise

    async def cancel(self, flow: "asyncio.Future[T]") -> None:
        """Cancels the flow and all tasks, and waits for their ends."""
        await cancel_tasks([flow, *self._tasks])
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()
