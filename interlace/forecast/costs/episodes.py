"""Episode on the virtual clock: its turns, the tokens that each turn receives, and the seconds of its tools."""

import asyncio

import numpy as np

from interlace.core.types import Prompt
from interlace.forecast.costs.lengths import interpolate, uniforms
from interlace.forecast.profile.types import Turns
from interlace.rollouts.base import Session
from interlace.rollouts.envs.jobs import Start

NO_ACTIONS = np.zeros((1, 1), np.float32)
"""[K, A] actions of a chunk that only takes time."""


class SimulatedEpisode:
    """Episode drawn from a turn model, keyed by its sample: the same under every schedule.

    With simulators, each turn's chunk goes to a simulator, and the next turn has a separate context. Without
    simulators, a wait takes the time of a tool, and the context of the next turn extends the previous turns.
    """

    def __init__(self, turns: Turns, *, brings_reward: bool, has_envs: bool = False) -> None:
        """brings_reward: False if a scorer gives the reward. has_envs: True if the run has simulators."""
        self._turns, self._brings_reward, self._has_envs = turns, brings_reward, has_envs

    async def run(self, prompt: Prompt, session: Session) -> float | None:
        """Runs the turns, with a wait for the tool between them."""
        model, seed = self._turns, session.seed
        count, is_right = uniforms("turns", seed)
        reward = float(is_right < model.reward) if self._brings_reward else None
        if self._has_envs:
            await self._play_turns(prompt, session, max(1, round(interpolate(model.turns, count))))
            return reward
        context = prompt.token_ids.tolist()
        drawn: list[int] = []
        for number in range(max(1, round(interpolate(model.turns, count)))):
            if number:
                length, seconds = uniforms("tool", seed, number)
                async with session.waiting("a tool"):
                    await asyncio.sleep(interpolate(model.tool_s, seconds))
                context = [*context, *drawn, *[0] * round(interpolate(model.given_tokens, length))]
            drawn = (await session.generate(context)).token_ids.tolist()
        return reward

    async def _play_turns(self, prompt: Prompt, session: Session, num_turns: int) -> None:
        sensed = [0] * round(interpolate(self._turns.given_tokens, 0.5))
        async with session.simulator(Start(task=0, init_state=0)) as env:
            for _ in range(num_turns):
                await session.generate([*prompt.token_ids.tolist(), *sensed])
                await env.chunk_step(NO_ACTIONS)
