"""Scores samples: in processes of their own, or on a thread; each call under a time limit."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.core.types import RewardResult, Sample
from interlace.rewards.base import RewardConfig, RewardFn, ScoreRequest, evaluate, is_async, load_reward, timed_out
from interlace.rewards.pool import ScoringPool
from interlace.rewards.shaping import shaped
from interlace.runtime.local.own_thread import OwnThread


class Scorer:
    """Scores responses by the configured function. Processes start with the first call and end with `close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError where there is no such reward."""
        self._config = config
        self._function = load_reward(config.name)
        self._is_async = is_async(self._function)
        self._pool: ScoringPool | None = None
        self._thread: OwnThread | None = None
        self._turn = asyncio.Lock()
        """Turn of callers that want the thread."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result a sample, in their order. A function that raises or is too slow fails its sample alone."""
        requests = [
            ScoreRequest(
                prompt=sample.prompt.text,
                response=sample.text,
                answer=sample.prompt.answer,
                metadata=sample.prompt.metadata,
            )
            for sample in samples
        ]
        in_processes = self._is_async or self._config.workers > 0
        results = await (self._in_processes(requests) if in_processes else self._on_thread(requests))
        shaping = self._config.shaping
        return [shaped(result, sample.sampled_ids, shaping) for result, sample in zip(results, samples, strict=True)]

    def close(self) -> None:
        """Ends the processes, with what they are doing. Called twice, it does nothing the second time."""
        if self._pool is not None:
            self._pool.close()
        if self._thread is not None:
            self._thread.end()
        self._pool = self._thread = None

    async def _in_processes(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        if not requests:
            return []
        if self._pool is None:
            self._pool = ScoringPool(self._config, is_async=self._is_async)
        futures = [asyncio.wrap_future(self._pool.submit(request)) for request in requests]
        return list(await asyncio.gather(*futures))

    async def _on_thread(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        results: list[RewardResult] = []
        async with self._turn:
            while len(results) < len(requests):
                thread = self._thread = self._thread or OwnThread("reward")
                work = _Work(self._function, self._config, requests[len(results) :])
                done = asyncio.wrap_future(thread.submit(work.run))
                num_scored = 0
                while not done.done() and work.left_s() > 0:
                    await asyncio.wait({done}, timeout=work.left_s())
                    num_scored = len(work.results)
                work.is_over = True
                results += work.results
                if not done.done():
                    self._thread = None
                    thread.abandon()
                    # Unless it was done with the late one just now.
                    results += [timed_out(self._config)] * (len(work.results) == num_scored)
        return results


@dataclass(slots=True)
class _Work:
    """Requests that a thread scores one after another."""

    function: RewardFn
    config: RewardConfig
    requests: Sequence[ScoreRequest]
    results: list[RewardResult] = field(default_factory=list)
    """Results of the first requests, so far."""
    since_s: float = 0.0
    """When the current one began."""
    is_over: bool = False
    """Flag: further results are dropped."""

    def run(self) -> None:
        """Scores the requests, on the thread."""
        for request in self.requests:
            self.since_s = time.monotonic()
            result = evaluate(self.function, self.config, request)
            if self.is_over:
                return
            self.results.append(result)

    def left_s(self) -> float:
        """Returns the seconds left for the current request."""
        used_s = time.monotonic() - self.since_s if self.since_s else 0.0
        return max(0.0, self.config.timeout_s - used_s)
