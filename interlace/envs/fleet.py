"""Environments in processes of their own, for episodes that await them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.envs.base import Start
from interlace.envs.film import FilmRecorder
from interlace.envs.load import EnvConfig
from interlace.envs.pool import EnvCounts, EnvPool
from interlace.envs.process import SlotChunk, SlotJob
from interlace.envs.spec import Array, EnvSpec, Observation


class EnvEpisode:
    """One episode in one environment, from its reset on. A call raises SimulatorError where the simulator broke."""

    def __init__(
        self, pool: EnvPool, slot: int, observation: Observation, recorder: FilmRecorder | None = None
    ) -> None:
        self._pool, self._slot, self._recorder = pool, slot, recorder
        self.observation = observation
        """Present observation; of an episode that ended, the final one."""

    async def chunk_step(self, actions: Array) -> SlotChunk:
        """Carries out actions, [K, A]; stops at the one that ends the episode."""
        work = SlotJob(slot=self._slot, kind="chunk", actions=np.asarray(actions))
        chunk: SlotChunk = await _done(self._pool, work)
        self.observation = chunk.observation
        await self.record()
        return chunk

    async def record(self) -> None:
        """Gives the present picture to the recorder, where there is one that can."""
        if self._recorder is not None and not self._recorder.problem:
            try:
                self._recorder.take(await self.render())
            except UserError as error:
                self._recorder.give_up(error)

    async def render(self) -> NDArray[np.uint8]:
        """Draws the present state, [H, W, 3]. Raises UserError where nothing there can."""
        picture: NDArray[np.uint8] = await _done(self._pool, SlotJob(slot=self._slot, kind="render"))
        return picture

    async def expert_action(self) -> Array:
        """Returns a scripted expert's action for the present state, [A]. Raises UserError where there is no expert."""
        action: Array = await _done(self._pool, SlotJob(slot=self._slot, kind="expert"))
        return action


class EnvFleet:
    """Environments of a run, leased to episodes one by one, in the order in which these ask.

    An episode's results depend on its start and its actions alone: not on its slot, on the number of processes, or on
    what other episodes do. Used within one event loop.
    """

    def __init__(self, config: EnvConfig) -> None:
        """Starts no process so far; start() does."""
        self.config = config
        self._pool: EnvPool | None = None
        self._free: list[list[int]] = []
        """By process: slots that are free."""
        self._queue: deque[asyncio.Future[int]] = deque()

    async def start(self) -> EnvSpec:
        """Makes the environments, unless that was done; says what they are like.

        Raises UserError for a family, settings or a task that cannot work.
        """
        if self._pool is None:
            self._pool = EnvPool(self.config)
            num_processes = self._pool.num_processes
            slots = range(self.config.num_envs)
            self._free = [[slot for slot in slots if slot % num_processes == home] for home in range(num_processes)]
        return await asyncio.shield(asyncio.wrap_future(self._pool.spec))

    @property
    def counts(self) -> EnvCounts:
        """Counts since the start, as of now."""
        return replace(self._pool.counts) if self._pool else EnvCounts()

    @asynccontextmanager
    async def episode(self, start: Start, *, recorder: FilmRecorder | None = None) -> AsyncIterator[EnvEpisode]:
        """Waits for a free environment and resets it; it is free again at the end of the `async with`.

        recorder: takes pictures, which changes nothing else; without a renderer it says why there are none. Raises
        SimulatorError where the reset broke.
        """
        await self.start()
        assert self._pool is not None
        slot = await self._lease()
        try:
            observation = await _done(self._pool, SlotJob(slot=slot, kind="reset", start=start))
            episode = EnvEpisode(self._pool, slot, observation, recorder)
            await episode.record()
            yield episode
        finally:
            self._pool.forget(slot)
            self._give_back(slot)

    def close(self) -> None:
        """Ends the processes, with what they are doing. Called twice, it does nothing the second time."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    async def _lease(self) -> int:
        most = max(self._free, key=len)  # the first of several: the process with the fewest episodes
        if most:
            return most.pop(0)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise

    def _give_back(self, slot: int) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        self._free[slot % len(self._free)].append(slot)


def read_spec(config: EnvConfig) -> EnvSpec:
    """Returns what a family's environments are like, asked of one in a process of its own that ends at once.

    Callable beside a running event loop. Raises UserError for a family, settings or a task that cannot work.
    """
    return _spec_of(config.model_copy(update={"num_envs": 1, "workers": 1}).model_dump_json())


@cache
def _spec_of(config: str) -> EnvSpec:
    async def ask() -> EnvSpec:
        fleet = EnvFleet(EnvConfig.model_validate_json(config))
        try:
            return await fleet.start()
        finally:
            fleet.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()


async def _done(pool: EnvPool, work: SlotJob) -> Any:
    return await asyncio.wrap_future(pool.submit(work))
