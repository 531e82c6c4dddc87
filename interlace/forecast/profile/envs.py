"""Measures a recipe's simulators: resets, and action chunks in one and in several environments at the same time."""

import asyncio
import time
from contextlib import AsyncExitStack
from statistics import median

import numpy as np

from interlace.forecast.profile.types import EnvCosts
from interlace.robots.envs.fleet import EnvFleet
from interlace.rollouts.envs.episode import EnvEpisode
from interlace.rollouts.envs.jobs import Start

ROUNDS = 8
"""Timed chunks per number of environments, if the time allows."""


async def measure_envs(envs: EnvFleet, *, num_envs: int, processes: int, chunk: int, budget_s: float) -> EnvCosts:
    """Measures environments on the host, with random actions; rendering is included if the observations are pictures.

    num_envs: environments of the recipe. processes: parallel simulator processes. chunk: actions per chunk. budget_s:
    approximate seconds; each number of environments is timed at least once.
    """
    until_s, resets = time.perf_counter() + budget_s, list[float]()
    chunks: list[tuple[int, float]] = []
    for size in sorted({1, max(1, num_envs // 4), num_envs}):
        seconds = [await _measure_round(envs, size, chunk, resets)]
        while len(seconds) < ROUNDS and time.perf_counter() < until_s:
            seconds.append(await _measure_round(envs, size, chunk, resets))
        # A chunk in several environments takes at least as long as in one; a shorter time is noise.
        chunks.append((size, max(median(seconds), chunks[-1][1] if chunks else 0.0)))
    return EnvCosts(chunks=tuple(chunks), reset_s=median(resets), host_processes=processes)


async def _measure_round(envs: EnvFleet, size: int, chunk: int, resets: list[float]) -> float:
    """Resets `size` environments and steps them together. Returns the seconds of the chunk; appends to `resets`."""
    async with AsyncExitStack() as stack:
        began_s = time.perf_counter()
        starts = [Start(task=0, init_state=number) for number in range(size)]
        episodes = await asyncio.gather(*(stack.enter_async_context(envs.episode(start)) for start in starts))
        reset_s = time.perf_counter()
        resets.append((reset_s - began_s) / size)
        await asyncio.gather(
            *(episode.chunk_step(_actions(episode, chunk, seed)) for seed, episode in enumerate(episodes))
        )
        return time.perf_counter() - reset_s


def _actions(episode: EnvEpisode, chunk: int, seed: int) -> np.ndarray:
    """Draws the actions of a chunk, [K, A], within the limits of the environment."""
    spec = episode.spec.action
    drawn = np.random.default_rng(seed).uniform(spec.low, spec.high, size=(chunk, len(spec.low)))
    return drawn.astype(np.float32)
