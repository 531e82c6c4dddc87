"""Scores samples in processes of their own, or by awaiting; each call under a real time limit."""

import asyncio
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as ScoreTimeout
from functools import cache
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

from interlace.core.types import RewardResult, Sample
from interlace.rewards.base import (
    RewardConfig,
    RewardFn,
    ScoreRequest,
    evaluate,
    evaluate_async,
    is_async,
    load_reward,
    preload_modules,
    timed_out,
)
from interlace.rewards.shaping import shaped

if TYPE_CHECKING:
    from pebble import ProcessPool


class Scorer:
    """Scores responses by the configured function. Processes start with the first call and end with `close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError where there is no such reward."""
        self._config = config
        self._function = load_reward(config.name)
        self._is_async = is_async(self._function)
        self._turns = asyncio.Semaphore(max(1, config.workers))
        """Of an `async def`."""
        self._pool: ProcessPool | None = None

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result a sample, in their order. A function that raises or takes too long fails its sample alone."""
        results = await self._evaluate(samples)
        shaping = self._config.shaping
        return [shaped(result, sample.token_ids, shaping) for result, sample in zip(results, samples, strict=True)]

    async def _evaluate(self, samples: Sequence[Sample]) -> list[RewardResult]:
        requests = [
            ScoreRequest(
                prompt=sample.prompt.text,
                response=sample.text,
                answer=sample.prompt.answer,
                metadata=sample.prompt.metadata,
            )
            for sample in samples
        ]
        if self._is_async:
            return list(await asyncio.gather(*(self._awaited(request) for request in requests)))
        if not self._config.workers:
            return [evaluate(self._function, self._config, request) for request in requests]
        futures = [self._scheduled(request) for request in requests]
        pairs = zip(futures, requests, strict=True)
        return list(await asyncio.gather(*(self._outcome(*pair, tries=self._config.workers) for pair in pairs)))

    def close(self) -> None:
        """Ends the processes, with what they are doing. Called twice, it does nothing the second time."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    async def _awaited(self, request: ScoreRequest) -> RewardResult:
        async with self._turns:
            return await evaluate_async(self._function, self._config, request)

    def _scheduled(self, request: ScoreRequest) -> Any:
        # One task a sample costs about 0.1 ms and keeps each limit exact; a batch of samples a task would not.
        arguments = self._config, request
        return self._started().schedule(_evaluate_here, args=arguments, timeout=self._config.timeout_s)

    async def _outcome(self, future: Any, request: ScoreRequest, *, tries: int) -> RewardResult:
        from pebble import ProcessExpired

        try:
            result: RewardResult = await asyncio.wrap_future(future)
        except ScoreTimeout:
            return timed_out(self._config)
        except ProcessExpired as error:
            # Whoever stops a run may send SIGTERM to all its processes: the step that it ends with needs its scores.
            if error.exitcode == signal.SIGTERM and tries:
                return await self._outcome(self._scheduled(request), request, tries=tries - 1)
            return RewardResult(failure=f"the reward function ended its process (exit code {error.exitcode})")
        return result

    def _started(self) -> "ProcessPool":
        if self._pool is None:
            from pebble import ProcessPool

            # Forked from a clean server: a worker starts in milliseconds, also after a time limit ended the last one,
            # and never inherits this process's torch threads or memory.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["interlace.rewards.scorer", *preload_modules(self._config.name)])
            _start_server()
            self._pool = ProcessPool(
                max_workers=self._config.workers,
                context=context,
                initializer=_prepare,
                initargs=(self._config.name,),
            )
        return self._pool


def _start_server() -> None:
    """Deaf to SIGTERM, which a whole run may get: without it all its workers count as dead, and none can start."""
    resource_tracker.ensure_running()  # where the server started it, it would undo the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare(name: str) -> None:
    """Imports what a reward needs as a worker process starts, before any time limit runs."""
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    _function_here(name)
    for module in preload_modules(name):
        importlib.import_module(module)


def _end_with_the_run() -> None:
    """Time limits are the run's: once it was killed, a function that loops would go on for good."""
    run = multiprocessing.parent_process()
    if run is not None:
        run.join()
        os._exit(1)


@cache
def _function_here(name: str) -> RewardFn:
    return load_reward(name)


def _evaluate_here(config: RewardConfig, request: ScoreRequest) -> RewardResult:
    # Deaf, as the server it was forked from, but while it scores: ended between two samples, it may hold the pool's
    # lock, and the pool counts as broken. What the function starts may be ended.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return evaluate(_function_here(config.name), config, request)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
