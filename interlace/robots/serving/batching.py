"""RequestBatches of concurrent requests, computed on one thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class RequestBatches(Generic[Asked, Answer]):
    """Computes all requests that wait at one time in one call. Used within one event loop."""

    def __init__(self, compute: Callable[[Sequence[Asked]], Sequence[Answer]], *, most: int) -> None:
        """compute: returns an answer for each request. most: requests of a call."""
        self._compute, self._most = compute, most
        self._waiting: list[tuple[Asked, asyncio.Future[Answer]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._task: asyncio.Task[None] | None = None

    async def ask(self, request: Asked) -> Answer:
        """Returns the answer to a request. Raises the error of its call."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    def close(self) -> None:
        """Ends the thread after its current call."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            batch = [(request, future) for request, future in batch if not future.done()]  # the others have gone
            if not batch:
                continue
            await self._run_batch([request for request, _ in batch], [future for _, future in batch])

    async def _run_batch(self, requests: Sequence[Asked], futures: Sequence["asyncio.Future[Answer]"]) -> None:
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, requests)
        except Exception as error:  # noqa: BLE001 - each robot gets it, and the server continues
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, answer in zip(futures, answers, strict=True):
            if not future.done():
                future.set_result(answer)
