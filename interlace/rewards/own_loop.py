"""Scoring by an `async def` of the program itself: on an event loop in a thread of this process."""

import asyncio
import threading
import time
from collections.abc import Sequence

from interlace.core.types import RewardResult
from interlace.rewards.base import LoadedReward, RewardConfig, evaluate_batch_async, make_timeout_result
from interlace.rewards.signature import ScoreRequest

CALLS_AT_ONCE = 16
"""Calls that are awaited at once if `workers` is 0."""
_BEAT_S = 0.05
"""Seconds between two signs of life of the event loop."""


class OwnLoop:
    """An event loop in a thread. A function that blocks it fails its samples; the thread is then abandoned."""

    def __init__(self, reward: LoadedReward, config: RewardConfig) -> None:
        self._reward, self._config = reward, config
        self._room = asyncio.Semaphore(config.workers or CALLS_AT_ONCE)
        self._loop = asyncio.new_event_loop()
        self._beat_s = time.monotonic()
        threading.Thread(target=self._run, name="async reward", daemon=True).start()

    @property
    def is_blocked(self) -> bool:
        """Returns whether a call has blocked the loop for longer than a call may take."""
        return time.monotonic() - self._beat_s > self._config.timeout_s + 1.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        """Returns one result for each request, from any event loop."""
        scoring = asyncio.run_coroutine_threadsafe(self._score(requests), self._loop)
        done = asyncio.wrap_future(scoring)
        while not done.done():
            await asyncio.wait({done}, timeout=4 * _BEAT_S)
            if self.is_blocked:
                done.cancel()
                late = make_timeout_result(self._config).failure
                reason = f"{late}: an async reward blocked its event loop, it must await"
                return [RewardResult(failure=reason)] * len(requests)
        return done.result()

    def close(self) -> None:
        """Ends the loop with the calls that it still awaits."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._beat)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)

    async def _score(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        async with self._room:
            scoring = asyncio.ensure_future(evaluate_batch_async(self._reward, self._config, requests))
            done, _ = await asyncio.wait({scoring}, timeout=self._config.timeout_s)
            if done:
                return scoring.result()
            scoring.cancel()
            return [make_timeout_result(self._config)] * len(requests)
